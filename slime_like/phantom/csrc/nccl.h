// NCCL: communicators of any size that need no other rank. A collective leaves this rank's own small data in every place.
typedef struct { char bytes[128]; } unique_id;
typedef struct { int size, rank; } communicator;

API status ncclGetUniqueId(unique_id *id) { memset(id, 7, sizeof *id); return 0; }
API status ncclGetVersion(int *v) { *v = 23007; return 0; }
static status join(void **out, int size, int rank) {
    communicator *c = malloc(sizeof *c);
    if (!c) return 2;
    *c = (communicator){size, rank};
    *out = c;
    return 0;
}
API status ncclCommInitRank(void **c, int size, unique_id id, int rank) { return join(c, size, rank); }
API status ncclCommInitRankConfig(void **c, int size, unique_id id, int rank, void *config) { return join(c, size, rank); }
API status ncclCommInitRankScalable(void **c, int size, int rank, int num_ids, void *ids, void *config) { return join(c, size, rank); }
API status ncclCommSplit(void *c, int color, int key, void **out, void *config) { return join(out, ((communicator *)c)->size, key); }
API status ncclCommCount(void *c, int *n) { *n = ((communicator *)c)->size; return 0; }
API status ncclCommUserRank(void *c, int *r) { *r = ((communicator *)c)->rank; return 0; }
API status ncclCommCuDevice(void *c, int *d) { *d = device; return 0; }
API status ncclCommGetAsyncError(void *c, int *error) { *error = 0; return 0; }
API const char *ncclGetErrorString(int error) { return "phantom GPU"; }
API const char *ncclGetLastError(void *c) { return "phantom GPU"; }
API status ncclCommAbort(void *c) { free(c); return 0; }
API status ncclCommDestroy(void *c) { free(c); return 0; }
SUCCEED(ncclCommFinalize)
SUCCEED(ncclCommDeregister)
SUCCEED(ncclCommSuspend)
SUCCEED(ncclCommResume)
SUCCEED(ncclGroupStart)
SUCCEED(ncclGroupEnd)
SUCCEED(ncclRedOpDestroy)
API status ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, void *c) { *op = 0; return 0; }

static size_t width(int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? widths[type] : 1;
}
static void carry(void *to, const void *from, size_t n) {
    if (to != from && n <= copy_limit() && owner_of(to) >= 0 && owner_of(from) >= 0) memmove(to, from, n);
}
API status ncclAllReduce(const void *s, void *d, size_t n, int type, int op, void *c, void *stream) {
    count(COLLECTIVES);
    carry(d, s, n * width(type));
    return 0;
}
API status ncclBroadcast(const void *s, void *d, size_t n, int type, int root, void *c, void *stream) {
    count(COLLECTIVES);
    carry(d, s, n * width(type));
    return 0;
}
API status ncclBcast(void *d, size_t n, int type, int root, void *c, void *stream) { count(COLLECTIVES); return 0; }
API status ncclReduce(const void *s, void *d, size_t n, int type, int op, int root, void *c, void *stream) {
    count(COLLECTIVES);
    carry(d, s, n * width(type));
    return 0;
}
API status ncclReduceScatter(const void *s, void *d, size_t n, int type, int op, void *c, void *stream) {
    count(COLLECTIVES);
    carry(d, (const char *)s + ((communicator *)c)->rank * n * width(type), n * width(type));
    return 0;
}
API status ncclAllGather(const void *s, void *d, size_t n, int type, void *c, void *stream) {
    count(COLLECTIVES);
    for (int i = 0; i < ((communicator *)c)->size; i++) carry((char *)d + i * n * width(type), s, n * width(type));
    return 0;
}
API status ncclSend(const void *s, size_t n, int type, int peer, void *c, void *stream) { count(COLLECTIVES); return 0; }
API status ncclRecv(void *d, size_t n, int type, int peer, void *c, void *stream) { count(COLLECTIVES); return 0; }
API status ncclAlltoAll(const void *s, void *d, size_t n, int type, void *c, void *stream) {
    count(COLLECTIVES);
    carry(d, s, n * width(type) * ((communicator *)c)->size);
    return 0;
}
