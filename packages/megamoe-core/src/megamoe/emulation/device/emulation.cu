// Everything that a rewritten kernel may call. Compiled to PTX (nvcc -rdc=true -ptx) and put in front of the kernel's own text.
#include "async.cuh"
#include "tensor.cuh"
#include "warp.cuh"
