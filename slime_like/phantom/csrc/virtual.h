// Virtual memory: reserved addresses, to which memory is mapped and unmapped again, as torch_memory_saver does.
typedef struct {
    size_t size;
    int owner, uses;  // uses: the handle, and each mapping
} physical;
typedef struct mapping {
    char *start;
    physical *memory;
    struct mapping *next;
} mapping;
static mapping *mappings;

static void *map_addresses(void *start, size_t n, int access, int fixed) {
    return mmap(start, n, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}
static void drop(physical *memory) {  // the caller has the lock
    if (--memory->uses) return;
    used[memory->owner] -= memory->size;
    free(memory);
}
API status cuMemGetAllocationGranularity(size_t *n, const int *properties, int option) { *n = GRANULARITY; return 0; }
API status cuMemAddressReserve(void **out, size_t n, size_t alignment, void *hint, uint64_t flags) {
    void *start = map_addresses(0, n, PROT_NONE, 0);
    *out = start == MAP_FAILED ? 0 : start;
    return *out ? 0 : OUT_OF_MEMORY;
}
API status cuMemAddressFree(void *start, size_t n) { return munmap(start, n) ? INVALID_VALUE : 0; }
API status cuMemCreate(void **out, size_t n, const int *properties, uint64_t flags) {  // properties[3]: the device
    int owner = properties[3];
    *out = 0;
    if (!n || n % GRANULARITY || owner < 0 || owner >= num_devices()) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    physical *new = charge(owner, n) ? malloc(sizeof *new) : 0;
    if (new) {
        *new = (physical){n, owner, 1};
        *out = new;
    }
    pthread_mutex_unlock(&lock);
    return new ? 0 : OUT_OF_MEMORY;
}
API status cuMemRelease(void *memory) {
    pthread_mutex_lock(&lock);
    drop(memory);
    pthread_mutex_unlock(&lock);
    return 0;
}
API status cuMemMap(void *start, size_t n, size_t offset, void *memory, uint64_t flags) {
    physical *p = memory;
    if (offset || n != p->size || map_addresses(start, n, PROT_READ | PROT_WRITE, MAP_FIXED) == MAP_FAILED) return INVALID_VALUE;
    block *b = malloc(sizeof *b);
    mapping *m = malloc(sizeof *m);
    if (!b || !m) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    *b = (block){start, n, p->owner, -1, 1};  // counted by cuMemCreate
    *m = (mapping){start, p, mappings};
    add_block(&blocks, b);
    mappings = m;
    p->uses++;
    pthread_mutex_unlock(&lock);
    return 0;
}
SUCCEED(cuMemSetAccess)
API status cuMemUnmap(void *start, size_t n) {
    physical *memory = 0;
    pthread_mutex_lock(&lock);
    for (mapping **link = &mappings; *link; link = &(*link)->next)
        if ((*link)->start == start && (*link)->memory->size == n) {
            mapping *gone = *link;
            *link = gone->next;
            memory = gone->memory;
            free(gone);
            break;
        }
    block *b = block_at(blocks, start);
    if (memory && b) {
        drop_block(&blocks, b);
        drop(memory);
        map_addresses(start, n, PROT_NONE, MAP_FIXED);
    }
    pthread_mutex_unlock(&lock);
    return memory ? 0 : INVALID_VALUE;
}
