// Properties of the GPUs: an H200's, except for the memory and the compute capability.
static int capability(void) { return (int)setting("PHANTOM_GPU_CAPABILITY", 90); }
static status choose_device(int d) {
    if (d < 0 || d >= num_devices()) return last_error = INVALID_DEVICE;
    device = d;
    return 0;
}
API cudaError_t cudaGetDeviceCount(int *n) { *n = num_devices(); return 0; }
API cudaError_t cudaGetDevice(int *d) { *d = device; return 0; }
API cudaError_t cudaSetDevice(int d) { return choose_device(d); }
API cudaError_t cudaInitDevice(int d, unsigned flags, unsigned f) { return choose_device(d); }
API cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
API cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
API cudaError_t cudaDeviceSynchronize(void) { count(SYNCS); return 0; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
SUCCEED(cudaDeviceEnablePeerAccess)
SUCCEED(cudaDeviceSetLimit)
SUCCEED(cudaProfilerStart)
SUCCEED(cudaProfilerStop)
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
API cudaError_t cudaDeviceGetPCIBusId(char *text, int n, int d) { snprintf(text, n, "0000:%02x:00.0", number_of(d) + 1); return 0; }

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    if (d < 0 || d >= num_devices()) return last_error = INVALID_DEVICE;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Phantom GPU");
    memset(p->uuid.bytes, UUID_BYTE + number_of(d), sizeof p->uuid.bytes);
    p->totalGlobalMem = total_memory();
    p->major = capability() / 10; p->minor = capability() % 10;
    p->multiProcessorCount = 132; p->warpSize = 32;
    p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
    p->totalConstMem = 65536; p->memPitch = 2147483647; p->textureAlignment = 512;
    p->memoryBusWidth = 6144; p->l2CacheSize = 60 << 20; p->asyncEngineCount = 3;
    p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->cooperativeLaunch = 1;
    p->concurrentManagedAccess = p->canMapHostMemory = 1;
    p->pciBusID = 1 + number_of(d);
    return 0;
}
static status attribute(int *value, int a) {
    *value = 0;
    switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 3201000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 6144; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrL2CacheSize: *value = 60 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: *value = 1; break;
    }
    return 0;
}
API cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { return attribute(v, a); }
API cudaError_t cudaGetLastError(void) { status error = last_error; last_error = 0; return error; }
API cudaError_t cudaPeekAtLastError(void) { return last_error; }

static status unknown_call(void) { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    extern status cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
    if (cuGetProcAddress_v2(name, out, version, flags, 0)) *out = (void *)unknown_call;
    if (result) *result = cudaDriverEntryPointSuccess;
    return 0;
}
