// libcuda.so.1, under whose name this library is loaded: modules load, functions are found, launches are counted.
SUCCEED(cuInit)
SUCCEED(cuModuleLoad)
SUCCEED(cuModuleUnload)
SUCCEED(cuDevicePrimaryCtxRelease_v2)
SUCCEED(cuCtxSetCurrent)
SUCCEED(cuCtxPushCurrent_v2)
SUCCEED(cuCtxSetLimit)
SUCCEED(cuFuncSetAttribute)
SUCCEED(cuFuncSetCacheConfig)
SUCCEED(cuKernelSetAttribute)
SUCCEED(cuLibraryUnload)
SUCCEED(cuLinkAddData_v2)
SUCCEED(cuLinkComplete)
SUCCEED(cuTensorMapEncodeTiled)
SUCCEED(cuTensorMapEncodeIm2col)
SUCCEED(cuMemsetD8Async)
SUCCEED(cuMemsetD32Async)
SUCCEED(cuEventRecord)
SUCCEED(cuStreamWriteValue32_v2)
SUCCEED(cuStreamWaitValue32_v2)
#define CONTEXT ((void *)0x77)
API status cuDriverGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
API status cuDeviceGetCount(int *n) { *n = num_devices(); return 0; }
API status cuDeviceGet(int *d, int i) { *d = i; return i < num_devices() ? 0 : INVALID_DEVICE; }
API status cuDeviceGetName(char *text, int n, int d) { snprintf(text, n, "Phantom GPU"); return 0; }
API status cuDeviceGetAttribute(int *v, int a, int d) { return attribute(v, a); }
API status cuDeviceTotalMem_v2(size_t *n, int d) { *n = total_memory(); return 0; }
API status cuDeviceGetUuid(void *u, int d) { memset(u, UUID_BYTE + number_of(d), 16); return 0; }
API status cuDeviceGetUuid_v2(void *u, int d) { memset(u, UUID_BYTE + number_of(d), 16); return 0; }
API status cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { if (flags) *flags = 0; *active = 1; return 0; }
API status cuDevicePrimaryCtxRetain(void **c, int d) { *c = CONTEXT; return 0; }
API status cuCtxGetCurrent(void **c) { *c = CONTEXT; return 0; }
API status cuCtxPopCurrent_v2(void **c) { if (c) *c = CONTEXT; return 0; }
API status cuCtxGetDevice(int *d) { *d = device; return 0; }
API status cuCtxGetLimit(size_t *v, int limit) { *v = 1024; return 0; }
API status cuCtxSynchronize(void) { count(SYNCS); return 0; }
API status cuStreamSynchronize(void *s) { count(SYNCS); return 0; }
API status cuStreamGetCtx(void *s, void **c) { *c = CONTEXT; return 0; }
API status cuStreamIsCapturing(void *s, int *c) { *c = capturing; return 0; }
API status cuStreamGetCaptureInfo_v3(void *s, int *c, uint64_t *id) { *c = capturing; return 0; }
API status cuGetErrorString(int error, const char **text) { *text = "phantom GPU"; return 0; }
API status cuGetErrorName(int error, const char **text) { *text = "PHANTOM_GPU"; return 0; }

API status cuModuleLoadData(void **m, const void *image) { *m = new_handle(); return 0; }
API status cuModuleLoadDataEx(void **m, const void *image, unsigned n, int *o, void **v) { *m = new_handle(); return 0; }
API status cuModuleGetFunction(void **f, void *m, const char *name) { *f = new_handle(); return 0; }
API status cuLibraryLoadData(void **l, const void *code, void *o, void **v, unsigned n, void *lo, void **lv, unsigned ln) { *l = new_handle(); return 0; }
API status cuLibraryGetKernel(void **k, void *l, const char *name) { *k = new_handle(); return 0; }
API status cuKernelGetFunction(void **f, void *k) { *f = k; return 0; }
API status cuLinkCreate_v2(unsigned n, int *o, void **v, void **l) { *l = new_handle(); return 0; }
API status cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 4 ? 32 : 0; return 0; }
API status cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s, void **args, void **extra) {
    return launch((dim3){gx, gy, gz}, (dim3){bx, by, bz});
}
API status cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s, void **args) {
    return launch((dim3){gx, gy, gz}, (dim3){bx, by, bz});
}
API status cuLaunchKernelEx(const unsigned *config, void *f, void **args, void **extra) {  // a CUlaunchConfig begins with the sizes
    return launch((dim3){config[0], config[1], config[2]}, (dim3){config[3], config[4], config[5]});
}
API status cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t shared) { *n = 2; return 0; }
API status cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, void *f, int threads, size_t shared, unsigned flags) { *n = 2; return 0; }
API status cuOccupancyMaxActiveClusters(int *n, void *f, void *config) { *n = 2; return 0; }

API status cuMemAlloc_v2(void **p, size_t n) { return allocate(p, n); }
API status cuMemFree_v2(void *p) { return release(p); }
API status cuMemGetInfo_v2(size_t *free, size_t *total) { return cudaMemGetInfo(free, total); }
API status cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t n, void *s) { return copy(to, from, n); }
API status cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t n, void *s) { return copy(to, from, n); }
API status cuPointerGetAttribute(void *v, int a, uintptr_t p) {
    int d = owner_of((void *)p);
    if (a == 3) *(uintptr_t *)v = p;             // device pointer
    else if (a == 2) *(int *)v = d < 0 ? 1 : 2;  // memory of the host or of a device
    else if (a == 9) *(int *)v = d < 0 ? 0 : d;  // device ordinal
    else *(int *)v = 0;
    return 0;
}
API status cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *result) {
    char numbered[200];
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    *out = dlsym(library, name);
    for (int i = 2; i <= 3 && !*out; i++) {
        snprintf(numbered, sizeof numbered, "%s_v%d", name, i);
        *out = dlsym(library, numbered);
    }
    if (result) *result = *out ? 0 : 1;
    return *out ? 0 : NOT_FOUND;
}
