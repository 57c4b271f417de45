/* Stands in front of CuTe DSL's runtime library where there is no GPU: a launch calls back, loading succeeds and does nothing. */
typedef int (*launch_t)(const void *configuration, const void *kernel, void **arguments);
static launch_t launched;

void capture_launches(launch_t function) { launched = function; }
int _cudaLaunchKernelEx(const void *configuration, const void *kernel, void **arguments) { return launched(configuration, kernel, arguments); }
