// Streams, events and graphs as objects: all work is complete immediately.
API cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = new_handle(); return 0; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = new_handle(); return 0; }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = new_handle(); return 0; }
SUCCEED(cudaStreamDestroy)
SUCCEED(cudaStreamQuery)
SUCCEED(cudaStreamWaitEvent)
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { count(SYNCS); return 0; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return 0; }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) { f(s, 0, data); return 0; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { f(data); return 0; }

API cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = new_handle(); return 0; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = new_handle(); return 0; }
SUCCEED(cudaEventDestroy)
SUCCEED(cudaEventRecord)
SUCCEED(cudaEventRecordWithFlags)
SUCCEED(cudaEventQuery)
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { count(SYNCS); return 0; }
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return 0; }

// ---- graphs: a capture begins and ends, and a launch of its graph is counted ------------------------------------------
static enum cudaStreamCaptureStatus capturing;
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = capturing; return 0; }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
    *c = capturing;
    if (id) *id = capturing;
    if (g) *g = (void *)8;
    if (d) *d = 0;
    if (e) *e = 0;
    if (n) *n = 0;
    return 0;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) { capturing = cudaStreamCaptureStatusActive; return 0; }
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    capturing = cudaStreamCaptureStatusNone;
    *g = new_handle();
    count(GRAPHS);
    return 0;
}
SUCCEED(cudaStreamUpdateCaptureDependencies)
SUCCEED(cudaThreadExchangeStreamCaptureMode)
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { *e = new_handle(); return 0; }
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { *e = new_handle(); return 0; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return 0; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { count(LAUNCHES); return 0; }
SUCCEED(cudaGraphDestroy)
SUCCEED(cudaGraphExecDestroy)
