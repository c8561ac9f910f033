// Kernels: the configuration is checked as a driver does before anything runs; nothing runs.
typedef struct { dim3 grid, block; size_t shared; void *stream; } configuration;
static __thread configuration stack[8];
static __thread int depth;

static status launch(dim3 grid, dim3 block) {
    count(LAUNCHES);
    int empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
    int large = (uint64_t)block.x * block.y * block.z > 1024 || block.z > 64 || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535;
    return empty || large ? (last_error = INVALID_CONFIGURATION) : 0;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    stack[depth++ & 7] = (configuration){grid, block, shared, stream};
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    configuration top = stack[--depth & 7];
    *grid = top.grid; *block = top.block; *shared = top.shared; *(void **)stream = top.stream;
    return 0;
}
API cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
API cudaError_t __cudaLaunchKernel(void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) { return launch(grid, block); }
API cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) { return launch(grid, block); }
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) { return launch(grid, block); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) { return launch(c->gridDim, c->blockDim); }
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->maxDynamicSharedSizeBytes = 49152;
    a->ptxVersion = a->binaryVersion = capability();
    return 0;
}
SUCCEED(cudaFuncSetAttribute)
SUCCEED(cudaKernelSetAttributeForDevice)
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t shared) { *n = threads > 512 ? 1 : 2; return 0; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int threads, size_t shared, unsigned flags) { *n = threads > 512 ? 1 : 2; return 0; }
API cudaError_t cudaOccupancyMaxActiveClusters(int *n, const void *f, const cudaLaunchConfig_t *c) { *n = 2; return 0; }
API cudaError_t cudaLibraryLoadData(cudaLibrary_t *l, const void *code, enum cudaJitOption *o, void **v, unsigned n, enum cudaLibraryOption *lo, void **lv, unsigned ln) { *l = new_handle(); return 0; }
API cudaError_t cudaLibraryGetKernel(cudaKernel_t *k, cudaLibrary_t l, const char *name) { *k = new_handle(); return 0; }
SUCCEED(cudaLibraryUnload)
