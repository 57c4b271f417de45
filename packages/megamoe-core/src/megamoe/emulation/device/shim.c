// Stands in front of CuTe DSL's runtime library: asks the emulation which machine code is to be loaded, and tells it before a function compiled
// for TVM-FFI unloads its own. All else goes to the real library.
typedef int (*loader_t)(void **library, const void *image);
typedef void (*unloader_t)(void **library);
static loader_t loader;
static unloader_t unloader;

// Null when Python ends: what is loaded then stays, as CuTe DSL leaves it, too.
void megamoe_set_hooks(loader_t load, unloader_t unload) { loader = load; unloader = unload; }

int _cudaLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values, unsigned jit_count, void *options, void *values, unsigned count) {
  (void)jit_options; (void)jit_values; (void)jit_count; (void)options; (void)values; (void)count;
  return loader ? loader(library, image) : 1;
}

void cuda_dialect_unload_library_once(void **library) {
  if (unloader) unloader(library);
}
