// Device memory as reserved address space: a page that nothing has written takes no memory of the host.
#define GRANULARITY ((size_t)2 << 20)  // cudaMalloc's

enum { PAGEABLE = -1, PINNED = -2, REGISTERED = -3 };  // owners of memory of the host; 0 and above are devices

typedef struct block {
    char *start;
    size_t size;
    int owner;
    int file;  // descriptor of memory that other processes can map; -1 for other memory
    int is_foreign;  // memory of another process, which counts it
} block;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;  // free() of this library takes it again
static void *blocks, *registered;  // trees by address: blocks do not overlap, but a registered one may lie in a pageable one
static size_t own_used[MAX_DEVICES], *used = own_used, peak[MAX_DEVICES], on_host[2];  // on_host: pageable, pinned
static __thread int device;
static __thread status last_error;

static int by_address(const void *a, const void *b) {
    const block *x = a, *y = b;
    return x->start + x->size <= y->start ? -1 : y->start + y->size <= x->start;
}
static block *block_at(void *tree, const void *address) {  // 0: no block has this address
    block key = {(char *)address, 1}, **node = tfind(&key, &tree, by_address);
    return node ? *node : 0;
}
static block *owned_block(const void *address) {
    block *b = block_at(registered, address);
    return b ? b : block_at(blocks, address);
}
static void add_block(void **tree, block *b) { tsearch(b, tree, by_address); }
static void drop_block(void **tree, block *b) {
    tdelete(b, tree, by_address);
    free(b);
}

static size_t total_memory(void) { return setting("PHANTOM_GPU_MEMORY", (size_t)80 << 30); }
static size_t context_memory(void) { return setting("PHANTOM_GPU_CONTEXT", (size_t)500 << 20); }
static size_t copy_limit(void) {
    static size_t limit = (size_t)-1;
    if (limit == (size_t)-1) limit = setting("PHANTOM_GPU_COPY_LIMIT", (size_t)1 << 20);
    return limit;
}
// Other processes read the memory that this one uses from a file in PHANTOM_GPU_USE, which is named by the process id.
static void publish(void) {
    const char *folder = getenv("PHANTOM_GPU_USE");
    char path[4096];
    if (!folder || !*folder) return;
    snprintf(path, sizeof path, "%s/%d", folder, getpid());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof own_used)) return;
    size_t *shared = mmap(0, sizeof own_used, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) used = shared;
    close(file);
}
static int charge(int owner, size_t n) {  // the caller has the lock; returns 0 if the memory is not enough
    static int is_published;
    if (!is_published) publish();
    is_published = 1;
    if (used[owner] + n + context_memory() > total_memory()) return 0;
    if ((used[owner] += n) > peak[owner]) peak[owner] = used[owner];
    return 1;
}
API size_t phantom_gpu_used(int d) { return used[d]; }
API size_t phantom_gpu_peak(int d) { return peak[d]; }
API void phantom_gpu_reset_peak(int d) { peak[d] = used[d]; }

static size_t *sum_of(int owner) { return owner < 0 ? &on_host[owner == PINNED || owner == REGISTERED] : &used[owner]; }
static void *map_memory(size_t size) {
    return mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
static void *map_shared_pages(size_t size);
static int has_values(size_t size);  // 1: a block of host memory of this size has values
static status reserve(void **out, size_t size, int owner) {  // owner: a device, PINNED, or PAGEABLE
    size_t unit = owner < 0 ? 4096 : GRANULARITY;
    *out = 0;
    if (!size) return 0;
    size = (size + unit - 1) & ~(unit - 1);
    pthread_mutex_lock(&lock);
    block *new = owner < 0 || charge(owner, size) ? malloc(sizeof *new) : 0;
    void *start = !new ? MAP_FAILED : owner >= 0 || has_values(size) ? map_memory(size) : map_shared_pages(size);
    if (start != MAP_FAILED) {
        *new = (block){start, size, owner, -1, 0};
        add_block(&blocks, new);
        *out = start;
        if (owner < 0) *sum_of(owner) += size;
    } else if (new) {
        if (owner >= 0) used[owner] -= size;
        free(new);
    }
    pthread_mutex_unlock(&lock);
    return *out ? 0 : (last_error = OUT_OF_MEMORY);
}
static status allocate(void **out, size_t size) { count(ALLOCATIONS); return reserve(out, size, device); }
static status remove_block(void *start, int is_foreign) {
    status result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    block *b = block_at(blocks, start);
    if (b && b->start == start && b->is_foreign == is_foreign) {
        if (!is_foreign) *sum_of(b->owner) -= b->size;
        if (b->file >= 0) close(b->file);
        munmap(b->start, b->size);
        drop_block(&blocks, b);
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result ? (last_error = result) : 0;
}
static status release(void *start) { return start ? remove_block(start, 0) : 0; }
static int owner_of(const void *address) {  // PAGEABLE also for memory that this library has not given out
    pthread_mutex_lock(&lock);
    block *b = owned_block(address);
    int owner = b ? b->owner : PAGEABLE;
    pthread_mutex_unlock(&lock);
    return owner;
}

API cudaError_t cudaMalloc(void **out, size_t n) { return allocate(out, n); }
API cudaError_t cudaMallocAsync(void **out, size_t n, cudaStream_t s) { return allocate(out, n); }
API cudaError_t cudaFree(void *p) { return release(p); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return release(p); }
API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = total_memory();
    *free = *total - used[device] - context_memory();
    return 0;
}

// ---- copies ----------------------------------------------------------------------------------------------------------
// A scalar that the host reads is 0 unless it has 8 bytes and looks like a small integer that a copy has put there: the
// result of a kernel is unknown, and the bytes of a reused block would be those of another tensor.
static int is_computed(const void *source, size_t n) { return n <= 4 || n == 8 && *(const uint64_t *)source >> 31; }
static void count_copy(int target, int source) {
    count(target < 0 ? TO_HOST : source < 0 ? TO_DEVICE : ON_DEVICE);
    if (target == PAGEABLE && source >= 0) count(TO_PAGEABLE);
}
static status copy(void *to, const void *from, size_t n) {
    int target = owner_of(to), source = owner_of(from);
    count_copy(target, source);
    if (source >= 0 && target < 0 && is_computed(from, n)) memset(to, 0, n);
    else if (n <= copy_limit()) memmove(to, from, n);
    return 0;
}
API cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { count(SYNCS); return copy(d, s, n); }
API cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) { return copy(d, s, n); }
API cudaError_t cudaMemcpyPeerAsync(void *d, int to, const void *s, int from, size_t n, cudaStream_t t) { return copy(d, s, n); }
API cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t t) {
    count_copy(owner_of(d), owner_of(s));
    if (w * h <= copy_limit())
        for (size_t row = 0; row < h; row++) memmove((char *)d + row * dp, (const char *)s + row * sp, w);
    return 0;
}
SUCCEED(cudaMemcpyToSymbol)
API cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    static void *address;
    if (!address) allocate(&address, 1);
    *out = address;
    return 0;
}
API cudaError_t cudaMemset(void *d, int value, size_t n) { if (n <= copy_limit()) memset(d, value, n); return 0; }
API cudaError_t cudaMemsetAsync(void *d, int value, size_t n, cudaStream_t s) { return cudaMemset(d, value, n); }
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    int d = owner_of(p);
    a->type = d >= 0 ? cudaMemoryTypeDevice : d == PINNED || d == REGISTERED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    a->device = d < 0 ? device : d;
    a->devicePointer = (void *)p;
    return 0;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int d) { *pool = (void *)1; return 0; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { *(uint64_t *)v = 0; return 0; }
SUCCEED(cudaMemPoolSetAttribute)
SUCCEED(cudaMemPoolTrimTo)
SUCCEED(cudaMemPoolSetAccess)
