/*
 * Makes the disk fail on purpose. Loaded with LD_PRELOAD, this stands between a process (Python's os.* and libsqlite3
 * alike) and libc, counts the calls that change or read files below one directory, and lets the k-th of them fail.
 *
 *   fault_arm(directory, k, mode)  begin to count; mode is one of `enum mode`, with STICKY if all later calls fail too
 *   fault_count()                  how many calls of the kinds that the mode counts there were since
 *   fault_disarm()                 let everything pass again
 *   fault_sector(path, at)         from now on, every read of the byte `at` of files whose path ends so fails; NULL ends it
 *   fault_trace(fd)                from now on tell fd of each call below the directory, whether counted or not, as
 *                                  "<name> <counted> <failed> <inode> <offset> <size> <path>\n" and `size` bytes: what
 *                                  was written, or the new name
 *   fault_mark(text)               put a line of that form into the trace, of a call named "mark"
 *
 * UNDERSTUDY_BAD_SECTOR="<at> <end of a path>" in the environment does the same as fault_sector, for a process that is
 * started with it.
 *
 * Only absolute paths are looked at. Not for several threads at once, reads excepted. Reads and writes of mapped memory
 * are not seen. Syncs that pass are not handed on: nobody cuts the power here, and some ten thousand runs would wait for
 * the disk.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { WRITE = 1, RESIZE = 2, SYNC = 4, CREATE = 8, RENAME = 16, REMOVE = 32, READ = 64 };
enum mode { FAIL_EIO, FAIL_ENOSPC, FAIL_SYNC, SHORT, SHORT_THEN_ENOSPC, FAIL_READ, SHORT_READ, FAIL_EINTR, STICKY = 16 };

/* Which calls a mode counts: those that can fail in this way. */
static const int counted_kinds[] = {
    [FAIL_EIO] = WRITE | RESIZE | SYNC | CREATE | RENAME | REMOVE,
    [FAIL_ENOSPC] = WRITE | RESIZE | SYNC | CREATE | RENAME,
    [FAIL_SYNC] = SYNC,
    [SHORT] = WRITE,
    [SHORT_THEN_ENOSPC] = WRITE,
    [FAIL_READ] = READ,
    [SHORT_READ] = READ,
    [FAIL_EINTR] = READ,
};

static char directory[PATH_MAX];
static size_t directory_length; /* 0 until armed */
static long fail_at, count;
static int mode, sticky, trace_fd = -1;

void fault_arm(const char *where, long k, int how)
{
    directory_length = strlen(where);
    memcpy(directory, where, directory_length + 1);
    fail_at = k;
    mode = how & ~STICKY;
    sticky = how & STICKY;
    count = 0;
}

long fault_count(void) { return count; }
void fault_disarm(void) { fail_at = LONG_MAX; }
void fault_trace(int fd) { trace_fd = fd; }

void fault_mark(const char *text)
{
    if (trace_fd >= 0)
        dprintf(trace_fd, "mark 0 0 0 0 %zu \n%s", strlen(text), text);
}

/* One call on its way. */
struct call {
    const char *name;
    int inside;  /* of the directory */
    int counted;
    int fault;   /* 0 it passes, -1 it writes only half, or the errno with which it fails */
    char path[PATH_MAX];
};

static int fault_of_this_call(void)
{
    long late = __sync_add_and_fetch(&count, 1) - fail_at;
    if (late < 0 || (!sticky && late > (mode == SHORT_THEN_ENOSPC)))
        return 0;
    switch (mode) {
    case FAIL_ENOSPC: return ENOSPC;
    case SHORT:
    case SHORT_READ: return -1;
    case FAIL_EINTR: return EINTR;
    case SHORT_THEN_ENOSPC: return late ? ENOSPC : -1;
    default: return EIO;
    }
}

/* Look at a call, by its path or, if that is NULL, by the path of its fd. */
static struct call begin(enum kind kind, const char *name, int fd, const char *path)
{
    struct call call = {.name = name};
    size_t n = directory_length;
    if (!n || (kind == READ && !(counted_kinds[mode] & READ)))
        return call;
    if (path)
        snprintf(call.path, sizeof call.path, "%s", path);
    else {
        char link[32];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        if (readlink(link, call.path, sizeof call.path - 1) < 0)
            return call;
    }
    call.inside = !strncmp(call.path, directory, n) && (call.path[n] == '/' || !call.path[n]);
    call.counted = call.inside && kind & counted_kinds[mode];
    if (call.counted)
        call.fault = fault_of_this_call();
    return call;
}

/* The function of this name in the next library, which is libc. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
/* What a call comes to. */
#define RESULT(real) (call.fault > 0 ? (errno = call.fault, -1) : (real))

static long end(const struct call *call, long result, int fd, long offset, const void *data, size_t size)
{
    if (trace_fd >= 0 && call->inside) {
        int error = errno;
        struct stat file = {0};
        if (fd >= 0)
            fstat(fd, &file);
        dprintf(trace_fd, "%s %d %d %lu %ld %zu %s\n", call->name, call->counted, result < 0,
                (unsigned long)file.st_ino, offset, result < 0 ? 0 : size, call->path);
        if (result >= 0 && size)
            (void)!REAL(write)(trace_fd, data, size);
        errno = error;
    }
    return result;
}

#define INTERPOSE_WRITE(name, parameters, where, ...)                                  \
    ssize_t name parameters                                                            \
    {                                                                                  \
        struct call call = begin(WRITE, #name, fd, NULL);                              \
        if (call.fault < 0 && size > 1)                                                \
            size /= 2;                                                                 \
        long at = call.inside ? where : 0;                                             \
        ssize_t written = RESULT(REAL(name)(__VA_ARGS__));                             \
        return end(&call, written, fd, at, data, written);                             \
    }
INTERPOSE_WRITE(write, (int fd, const void *data, size_t size), lseek(fd, 0, SEEK_CUR), fd, data, size)
INTERPOSE_WRITE(pwrite, (int fd, const void *data, size_t size, off_t offset), offset, fd, data, size, offset)
INTERPOSE_WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t offset), offset, fd, data, size, offset)

static char sector_path[PATH_MAX];
static off_t sector_at;

void fault_sector(const char *path, long at)
{
    snprintf(sector_path, sizeof sector_path, "%s", path ? path : "");
    sector_at = at;
}

__attribute__((constructor)) static void sector_of_environment(void)
{
    const char *text = getenv("UNDERSTUDY_BAD_SECTOR");
    const char *path = text ? strchr(text, ' ') : NULL;
    if (path)
        fault_sector(path + 1, atol(text));
}

static int is_in_bad_sector(int fd, off_t offset, size_t size)
{
    char link[32], path[PATH_MAX];
    size_t length = strlen(sector_path);
    if (!length)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < (ssize_t)length || strncmp(path + n - length, sector_path, length))
        return 0;
    return offset / 512 <= sector_at / 512 && sector_at / 512 <= (off_t)(offset + size - 1) / 512;
}

#define INTERPOSE_READ(name, parameters, where, ...)                                   \
    ssize_t name parameters                                                            \
    {                                                                                  \
        struct call call = begin(READ, #name, fd, NULL);                               \
        if (!call.fault && size && is_in_bad_sector(fd, where, size))                  \
            call.fault = EIO;                                                          \
        if (call.fault < 0 && size > 1)                                                \
            size /= 2;                                                                 \
        ssize_t found = RESULT(REAL(name)(__VA_ARGS__));                               \
        return call.counted ? end(&call, found, fd, 0, NULL, 0) : found;               \
    }
INTERPOSE_READ(read, (int fd, void *data, size_t size), lseek(fd, 0, SEEK_CUR), fd, data, size)
INTERPOSE_READ(pread, (int fd, void *data, size_t size, off_t offset), offset, fd, data, size, offset)
INTERPOSE_READ(pread64, (int fd, void *data, size_t size, off64_t offset), offset, fd, data, size, offset)

/* A read into several buffers that is to be short fills only the first. */
#define INTERPOSE_READV(name, parameters, ...)                                         \
    ssize_t name parameters                                                            \
    {                                                                                  \
        struct call call = begin(READ, #name, fd, NULL);                               \
        size_t size = 0;                                                               \
        for (int i = 0; i < n; i++)                                                    \
            size += parts[i].iov_len;                                                  \
        if (!call.fault && size && is_in_bad_sector(fd, offset, size))                 \
            call.fault = EIO;                                                          \
        struct iovec half = {parts[0].iov_base, (parts[0].iov_len + 1) / 2};           \
        if (call.fault < 0)                                                            \
            parts = &half, n = 1;                                                      \
        ssize_t found = RESULT(REAL(name)(__VA_ARGS__));                               \
        return call.counted ? end(&call, found, fd, 0, NULL, 0) : found;               \
    }
INTERPOSE_READV(preadv, (int fd, const struct iovec *parts, int n, off_t offset), fd, parts, n, offset)
INTERPOSE_READV(preadv64, (int fd, const struct iovec *parts, int n, off64_t offset), fd, parts, n, offset)
INTERPOSE_READV(preadv2, (int fd, const struct iovec *parts, int n, off_t offset, int flags), fd, parts, n, offset, flags)
INTERPOSE_READV(preadv64v2, (int fd, const struct iovec *parts, int n, off64_t offset, int flags), fd, parts, n, offset, flags)

#define INTERPOSE_FD(kind, name, parameters, where, real)                              \
    int name parameters                                                                \
    {                                                                                  \
        struct call call = begin(kind, #name, fd, NULL);                               \
        return end(&call, RESULT(real), fd, where, NULL, 0);                           \
    }
INTERPOSE_FD(RESIZE, ftruncate, (int fd, off_t size), size, REAL(ftruncate)(fd, size))
INTERPOSE_FD(RESIZE, ftruncate64, (int fd, off64_t size), size, REAL(ftruncate64)(fd, size))
INTERPOSE_FD(SYNC, fsync, (int fd), 0, fcntl(fd, F_GETFD) < 0 ? -1 : 0)
INTERPOSE_FD(SYNC, fdatasync, (int fd), 0, fcntl(fd, F_GETFD) < 0 ? -1 : 0)

#define INTERPOSE_PATH(kind, name, parameters, text, ...)                              \
    int name parameters                                                                \
    {                                                                                  \
        struct call call = begin(kind, #name, -1, path);                               \
        return end(&call, RESULT(REAL(name)(__VA_ARGS__)), -1, 0, text, strlen(text)); \
    }
INTERPOSE_PATH(RENAME, rename, (const char *path, const char *new_path), new_path, path, new_path)
INTERPOSE_PATH(REMOVE, unlink, (const char *path), "", path)
INTERPOSE_PATH(CREATE, mkdir, (const char *path, mode_t permissions), "", path, permissions)

/* Opening is looked at where it may make a file; only then is there a last argument. Its flags are told as offset. */
#define INTERPOSE_OPEN(name, parameters, ...)                                          \
    int name parameters                                                                \
    {                                                                                  \
        if (!__OPEN_NEEDS_MODE(flags))                                                 \
            return REAL(name)(__VA_ARGS__);                                            \
        va_list rest;                                                                  \
        va_start(rest, flags);                                                         \
        mode_t permissions = va_arg(rest, mode_t);                                     \
        va_end(rest);                                                                  \
        struct call call = begin(CREATE, #name, -1, path);                             \
        int fd = RESULT(REAL(name)(__VA_ARGS__, permissions));                         \
        return end(&call, fd, fd, flags, NULL, 0);                                     \
    }
INTERPOSE_OPEN(open, (const char *path, int flags, ...), path, flags)
INTERPOSE_OPEN(open64, (const char *path, int flags, ...), path, flags)
INTERPOSE_OPEN(openat, (int at, const char *path, int flags, ...), at, path, flags)
INTERPOSE_OPEN(openat64, (int at, const char *path, int flags, ...), at, path, flags)
