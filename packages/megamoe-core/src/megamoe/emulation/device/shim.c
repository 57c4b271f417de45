// Stands in front of CuTe DSL's runtime library: asks the emulation which machine code is to be loaded. All else goes to the real library.
typedef int (*loader_t)(void **library, const void *image);
static loader_t loader;

void megamoe_set_loader(loader_t function) { loader = function; }

int _cudaLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values, unsigned jit_count, void *options, void *values, unsigned count) {
  (void)jit_options; (void)jit_values; (void)jit_count; (void)options; (void)values; (void)count;
  return loader ? loader(library, image) : 1;
}
