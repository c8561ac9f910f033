// cuBLAS and cuBLASLt: handles, and products that are counted.
#define PRODUCT(name) \
    API int name(void) { count(PRODUCTS); return 0; }
API status cublasCreate_v2(void **h) { *h = new_handle(); return 0; }
API status cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
API status cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
API status cublasGetSmCountTarget(void *h, int *n) { *n = 0; return 0; }
SUCCEED(cublasDestroy_v2)
SUCCEED(cublasSetPointerMode_v2)
SUCCEED(cublasSetMathMode)
SUCCEED(cublasSetSmCountTarget)
SUCCEED(cublasSetStream_v2)
SUCCEED(cublasSetWorkspace_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasStrsm_v2)
PRODUCT(cublasDtrsm_v2)
PRODUCT(cublasStrsmBatched)
PRODUCT(cublasDtrsmBatched)

PRODUCT(cublasLtMatmul)
API status cublasLtCreate(void **h) { *h = new_handle(); return 0; }
API status cublasLtMatmulDescCreate(void **d, int compute, int scale) { *d = new_handle(); return 0; }
API status cublasLtMatmulPreferenceCreate(void **p) { *p = new_handle(); return 0; }
API status cublasLtMatrixLayoutCreate(void **l, int type, uint64_t rows, uint64_t columns, int64_t stride) { *l = new_handle(); return 0; }
API status cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, void *results, int *num_results) { *num_results = 1; return 0; }
SUCCEED(cublasLtDestroy)
SUCCEED(cublasLtMatmulDescDestroy)
SUCCEED(cublasLtMatmulDescSetAttribute)
SUCCEED(cublasLtMatmulPreferenceDestroy)
SUCCEED(cublasLtMatmulPreferenceSetAttribute)
SUCCEED(cublasLtMatrixLayoutDestroy)
SUCCEED(cublasLtMatrixLayoutSetAttribute)
