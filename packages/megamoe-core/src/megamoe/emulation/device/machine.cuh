// The machine below the device functions: who runs, shared memory of the cluster, barriers, and the few instructions that are used as such.
// Tests name another header in EMULATION_MACHINE, to run all the rest on the host.
#pragma once
#include "host.cuh"

#ifdef EMULATION_MACHINE
#include EMULATION_MACHINE
#else

#define EMU_CALL extern "C" __device__ __noinline__
#define EMU_INLINE __device__ __forceinline__
#define EMU_FUNCTION static __device__ __noinline__
#define EMU_STATE __device__
#define EMU_LOOP _Pragma("unroll 1")

EMU_INLINE u32 sm() { u32 r; asm volatile("mov.u32 %0, %%smid;" : "=r"(r)); return r; }
EMU_INLINE u32 lane() { u32 r; asm volatile("mov.u32 %0, %%laneid;" : "=r"(r)); return r; }
EMU_INLINE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
EMU_INLINE u32 cluster_size() { u32 r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
EMU_INLINE u64 now() { u64 r; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(r)); return r; }
EMU_INLINE u32 thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
EMU_INLINE u32 threads() { return blockDim.x * blockDim.y * blockDim.z; }

// Number of the cluster in its grid.
EMU_INLINE u32 cluster_index() {
  u32 x, y, z, nx, ny;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(x));
  asm volatile("mov.u32 %0, %%clusterid.y;" : "=r"(y));
  asm volatile("mov.u32 %0, %%clusterid.z;" : "=r"(z));
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(nx));
  asm volatile("mov.u32 %0, %%nclusterid.y;" : "=r"(ny));
  return x + nx * (y + ny * z);
}

// Addresses of shared memory carry the CTA's rank in its cluster in bits 24 and up.
EMU_INLINE u32 load_shared(u32 a) { u32 v; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
EMU_INLINE u32 load_shared16(u32 a) { u16 v; asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(v) : "r"(a) : "memory"); return v; }
EMU_INLINE u32 load_shared8(u32 a) { u32 v; asm volatile("ld.shared::cluster.u8 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
EMU_INLINE void store_shared(u32 a, uint4 v) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
EMU_INLINE void store_shared32(u32 a, u32 v) { asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
EMU_INLINE void store_shared8(u32 a, u32 v) { asm volatile("st.shared::cluster.u8 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
EMU_INLINE u32 shared_begin() { u32 r; asm volatile("mov.u32 %0, %%reserved_smem_offset_end;" : "=r"(r)); return r; }
EMU_INLINE u32 shared_size() { u32 r; asm volatile("mov.u32 %0, %%total_smem_size;" : "=r"(r)); return r; }
EMU_INLINE void cluster_fence() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
// Before native bulk and tensor copies touch what threads wrote: to shared memory and, in all_proxies_fence, anywhere.
EMU_INLINE void shared_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
EMU_INLINE void all_proxies_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
EMU_INLINE u64 global_address(const void *p) { return (u64)__cvta_generic_to_global(p); }

EMU_INLINE void complete_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
EMU_INLINE void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Two E4M3 or E5M2 codes as halves; products of pairs of halves.
EMU_INLINE u32 e4m3_pair(u32 v) { u32 r; u16 h = (u16)v; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(h)); return r; }
EMU_INLINE u32 e5m2_pair(u32 v) { u32 r; u16 h = (u16)v; asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(r) : "h"(h)); return r; }
EMU_INLINE u32 multiply_pair(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }

// mma.sync m16n8k16 of a warp, added to c.
EMU_INLINE void multiply_16(float *c, const u32 *a, u32 b0, u32 b1, bool bf16) {
  if (bf16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
