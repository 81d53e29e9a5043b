/* A hidapi whose only device, a SpaceNavigator, is a named pipe: what is written there is what it reports.

   The kernel's own way to make a device (uhid) is not there in a container. Everything above this library is real:
   easyhid, pyspacemouse, SpaceMouseDevice. A report comes as its length in one byte, then its bytes. The end of the
   pipe is the cable that is pulled. */

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

struct hid_device_info {
    char *path;
    unsigned short vendor_id, product_id;
    wchar_t *serial_number;
    unsigned short release_number;
    wchar_t *manufacturer_string, *product_string;
    unsigned short usage_page, usage;
    int interface_number;
    struct hid_device_info *next;
};
typedef struct { int fd; } hid_device;

int hid_init(void) { return 0; }
int hid_exit(void) { return 0; }

struct hid_device_info *hid_enumerate(unsigned short vendor, unsigned short product) {
    const char *path = getenv("HIDAPI_PIPE");
    (void)vendor;
    (void)product;
    if (path == NULL) return NULL;
    struct hid_device_info *info = calloc(1, sizeof *info);
    info->path = strdup(path);
    info->vendor_id = 0x46D;
    info->product_id = 0xC626;
    info->serial_number = wcsdup(L"1");
    info->manufacturer_string = wcsdup(L"3Dconnexion");
    info->product_string = wcsdup(L"SpaceNavigator");
    return info;
}

void hid_free_enumeration(struct hid_device_info *info) { (void)info; }

hid_device *hid_open_path(const char *path) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) return NULL;
    hid_device *device = malloc(sizeof *device);
    device->fd = fd;
    return device;
}

int hid_set_nonblocking(hid_device *device, int on) {
    return fcntl(device->fd, F_SETFL, on ? O_NONBLOCK : 0);
}

int hid_read(hid_device *device, unsigned char *data, size_t size) {
    unsigned char length, report[64];
    ssize_t got = read(device->fd, &length, 1);
    if (got < 0 && errno == EAGAIN) return 0;
    if (got != 1 || length > sizeof report || read(device->fd, report, length) != length) return -1;
    size_t taken = length < size ? length : size;
    memcpy(data, report, taken);
    return (int)taken;
}

void hid_close(hid_device *device) {
    close(device->fd);
    free(device);
}
