// GPUs of the machine, and those that CUDA_VISIBLE_DEVICES names: as in a driver, the first invalid entry ends the list. Entries are
// numbers: a UUID, which a driver accepts, is invalid here, and a repeated number, which a driver refuses, is accepted.
#define MAX_DEVICES 64
#define UUID_BYTE 17  // value of every byte of the UUID of GPU 0

static int num_installed(void) { size_t n = setting("PHANTOM_GPU_DEVICES", 1); return n > MAX_DEVICES ? MAX_DEVICES : (int)n; }
static int visible[MAX_DEVICES], num_visible;
static void read_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text)
        for (; num_visible < num_installed(); num_visible++) visible[num_visible] = num_visible;
    while (text && num_visible < MAX_DEVICES) {
        char *end;
        long number = strtol(text, &end, 10);
        if (end == text || number < 0 || number >= num_installed()) break;
        visible[num_visible++] = number;
        if (*end != ',') break;
        text = end + 1;
    }
}
static int num_devices(void) {  // read at the first call, as by a driver: the variable may change before it
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_visible);
    return num_visible;
}
static int number_of(int device) { return device >= 0 && device < num_devices() ? visible[device] : device; }
