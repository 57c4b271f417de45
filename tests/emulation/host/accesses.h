// What the compiler calls before every access of functions compiled with -fsanitize=thread: plain ones are weak, volatile ones relaxed.
#pragma once

#ifdef __SANITIZE_THREAD__
#define UNTOLD __attribute__((no_sanitize("thread")))
UNTOLD static void tell(const volatile void *p, u64 size, bool write, u32 how) {
  if (!running) return;
  for (u64 at = (u64)p, end = at + size; at < end;) {  // in pieces that lie in no two granules
    u32 piece = at % 8 == 0 && end - at >= 8 && !how ? 8 : at % 4 == 0 && end - at >= 4 ? 4 : 1;
    access_told(running, at, piece, write, how);
    at += piece;
  }
}
#define ACCESSES(SIZE)                                                                                   \
  UNTOLD void __tsan_read##SIZE(void *p) { tell(p, SIZE, false, 0); }                                     \
  UNTOLD void __tsan_write##SIZE(void *p) { tell(p, SIZE, true, 0); }                                     \
  UNTOLD void __tsan_unaligned_read##SIZE(void *p) { tell(p, SIZE, false, 0); }                           \
  UNTOLD void __tsan_unaligned_write##SIZE(void *p) { tell(p, SIZE, true, 0); }                           \
  UNTOLD void __tsan_volatile_read##SIZE(void *p) { tell(p, SIZE, false, SCOPE_SYS); }                    \
  UNTOLD void __tsan_volatile_write##SIZE(void *p) { tell(p, SIZE, true, SCOPE_SYS); }
extern "C" {
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
UNTOLD void __tsan_read_range(void *p, u64 size) { tell(p, size, false, 0); }
UNTOLD void __tsan_write_range(void *p, u64 size) { tell(p, size, true, 0); }
UNTOLD void __tsan_func_entry(void *) {}
UNTOLD void __tsan_func_exit(void *) {}
UNTOLD void __tsan_init() {}
}
#undef ACCESSES
#else
#define UNTOLD
static inline void tell(const volatile void *, u64, bool, u32) {}
#endif
