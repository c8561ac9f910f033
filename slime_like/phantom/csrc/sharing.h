// CUDA IPC: a shared block moves into an unnamed file, which other processes of this user map by the handle.
#include <sys/stat.h>

#define CHUNK ((size_t)64 << 10)

typedef struct {
    char *start;
    size_t size;
    ino_t inode;
    pid_t pid;
    int file;
} shared_memory;
_Static_assert(sizeof(shared_memory) <= sizeof(cudaIpcMemHandle_t), "a handle has the memory's address");

static int move_to_file(block *b) {  // chunks of zeros stay holes
    static const char zeros[CHUNK];
    int file = memfd_create("phantom GPU", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, b->size)) goto failed;
    for (size_t i = 0; i < b->size; i += CHUNK) {
        size_t n = b->size - i < CHUNK ? b->size - i : CHUNK;
        if (memcmp(b->start + i, zeros, n) && pwrite(file, b->start + i, n, i) != (ssize_t)n) goto failed;
    }
    if (mmap(b->start, b->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0) == MAP_FAILED) goto failed;
    return b->file = file;
failed:
    if (file >= 0) close(file);
    return -1;
}
API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
    shared_memory shared = {0};
    struct stat state;
    pthread_mutex_lock(&lock);
    block *b = block_at(blocks, p);
    if (b && b->owner >= 0 && !b->is_foreign && (b->file >= 0 || move_to_file(b) >= 0) && !fstat(b->file, &state))
        shared = (shared_memory){b->start, b->size, state.st_ino, getpid(), b->file};
    pthread_mutex_unlock(&lock);
    if (!shared.start) return last_error = INVALID_VALUE;
    memset(h, 0, sizeof *h);
    memcpy(h, &shared, sizeof shared);
    count(SHARES);
    return 0;
}
static void *map_foreign(const shared_memory *shared) {  // 0: the memory has been freed, or its process has ended
    char path[64];
    struct stat state;
    void *start = MAP_FAILED;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared->pid, shared->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return 0;
    block *new = malloc(sizeof *new);
    if (new && !fstat(file, &state) && state.st_ino == shared->inode && state.st_size == (off_t)shared->size)
        start = mmap(0, shared->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (start == MAP_FAILED) {
        free(new);
        return 0;
    }
    pthread_mutex_lock(&lock);
    *new = (block){start, shared->size, device, -1, 1};
    add_block(&blocks, new);
    pthread_mutex_unlock(&lock);
    return start;
}
static void *own_memory(const shared_memory *shared) {  // 0: the memory has been freed
    struct stat state;
    pthread_mutex_lock(&lock);
    block *b = owned_block(shared->start);
    void *start = b && b->file >= 0 && !fstat(b->file, &state) && state.st_ino == shared->inode ? b->start : 0;
    pthread_mutex_unlock(&lock);
    return start;
}
// A driver refuses a handle in the process that made it. Here that process gets the memory itself.
API cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned flags) {
    shared_memory shared;
    memcpy(&shared, &h, sizeof shared);
    *p = shared.pid == getpid() ? own_memory(&shared) : map_foreign(&shared);
    if (!*p) return last_error = INVALID_VALUE;
    count(OPENINGS);
    return 0;
}
API cudaError_t cudaIpcCloseMemHandle(void *p) {
    count(CLOSINGS);
    pthread_mutex_lock(&lock);
    block *b = block_at(blocks, p);
    int is_device = b && b->owner >= 0, is_foreign = b && b->start == p && b->is_foreign;
    pthread_mutex_unlock(&lock);
    return is_foreign ? remove_block(p, 1) : is_device ? 0 : (last_error = INVALID_VALUE);
}
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) { memset(h, 0, sizeof *h); return 0; }
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) { *e = new_handle(); return 0; }
