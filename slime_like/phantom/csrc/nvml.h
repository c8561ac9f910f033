// libnvidia-ml.so.1: lists all GPUs of the machine, as Ray, SGLang and torch query them.
API int nvmlInit_v2(void) { return 0; }
API int nvmlInitWithFlags(unsigned flags) { return 0; }
API int nvmlShutdown(void) { return 0; }
API int nvmlDeviceGetCount_v2(unsigned *n) { *n = num_installed(); return 0; }
API int nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "0.0 phantom"); return 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = CUDART_VERSION; return 0; }
API const char *nvmlErrorString(int error) { return "phantom GPU"; }
enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3 };
API int nvmlDeviceGetHandleByIndex_v2(unsigned d, void **h) {
    if (d >= (unsigned)num_installed()) return NVML_INVALID_ARGUMENT;
    *h = (void *)(uintptr_t)(d + 1);
    return 0;
}
static int number_of_handle(void *h) { return (int)(uintptr_t)h - 1; }
API int nvmlDeviceGetIndex(void *h, unsigned *d) { *d = number_of_handle(h); return 0; }
API int nvmlDeviceGetName(void *h, char *text, unsigned n) { snprintf(text, n, "Phantom GPU"); return 0; }
API int nvmlDeviceGetUUID(void *h, char *text, unsigned n) {
    int b = UUID_BYTE + number_of_handle(h);
    snprintf(text, n, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b, b, b, b, b, b, b, b, b, b, b, b, b, b, b, b);
    return 0;
}
API int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *info) {  // total, free, used; without the memory of processes
    info[0] = info[1] = total_memory();
    info[2] = 0;
    return 0;
}
API int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { *major = capability() / 10; *minor = capability() % 10; return 0; }
API int nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *state) { *state = 0; return 0; }
API int nvmlDeviceGetMigMode(void *h, unsigned *current, unsigned *pending) { return NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **h) {
    unsigned domain, bus;
    return sscanf(id, "%x:%x", &domain, &bus) == 2 && bus ? nvmlDeviceGetHandleByIndex_v2(bus - 1, h) : NVML_INVALID_ARGUMENT;
}
API int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *processes) { *n = 0; return 0; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, void *info) { return NVML_NOT_SUPPORTED; }
