/*
 * The disks, the clock and the random numbers of simulated machines. Loaded with LD_PRELOAD, this stands between a
 * process (Python's os.* and libsqlite3 alike) and libc. A machine is a directory. Calls pass to the real files, on a
 * file system in memory, and what a power cut would take back is kept in lists:
 *
 *   writes and sizes of a file   until its fsync
 *   changes of names             until the fsync of their directory
 *
 * A fault rule lets some of the calls fail, write half or take long. A machine that is down refuses every call, and
 * its descriptors read and write nothing: so a "killed" process can be unwound without an effect on its files. disk.py
 * has the other half: what is left after a power cut. One thread only. Writes to mapped memory are not seen.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define MAX_FDS 65536
#define MAX_MACHINES 16
#define MAX_RULES 16
#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

enum kind { READ = 1, WRITE = 2, RESIZE = 4, SYNC = 8, OPEN = 16, CREATE = 32, RENAME = 64, REMOVE = 128 };
enum change { CREATED, RENAMED, REMOVED, MADE_DIRECTORY, REMOVED_DIRECTORY, LINKED };

/* A part of one page that was written and not synced. `lost`: a sync of it failed, and the system believes it clean. */
struct page_write { int64_t offset; int32_t size, lost; unsigned char *before, *after; };

struct file {
    uint64_t inode;
    int32_t machine, fd;   /* a descriptor of our own, which keeps the inode */
    int64_t durable_size;
    int32_t num_sizes, num_writes, sizes_capacity, writes_capacity;
    int64_t *sizes;        /* after each change of the size that was not synced */
    struct page_write *writes;
};

/* A change of names in a directory that was not synced. */
struct name_change { int32_t change, machine; uint64_t inode, replaced; char *path, *new_path; };

struct rule { int32_t machine, kinds, skip, times, error, half; int64_t delay_ns, hits; char where[64]; };

static struct { char path[PATH_MAX]; size_t length; int down; } machines[MAX_MACHINES];
static int num_machines, null_fd = -1;
static struct { struct file *file; char *directory; int machine; } fds[MAX_FDS];
static struct file **files;
static int num_files, files_capacity, highest_fd;
static struct name_change *changes;
static int num_changes, changes_capacity;
static struct rule rules[MAX_RULES];
static int running;
static int64_t monotonic_ns, wall_offset_ns, num_calls;
static uint64_t random_state;

static void *grown(void *array, int32_t *capacity, int needed, size_t size)
{
    if (needed <= *capacity)
        return array;
    *capacity = needed * 2;
    return realloc(array, *capacity * size);
}

/* ---- what Python calls */

void sim_begin(uint64_t seed, int64_t now_ns)
{
    random_state = seed;
    monotonic_ns = 1000000000000;
    wall_offset_ns = now_ns - monotonic_ns;
    if (null_fd < 0)
        null_fd = REAL(open)("/dev/null", O_RDWR | O_CLOEXEC);
    memset(rules, 0, sizeof rules);
    num_calls = 0;
    running = 1;
}

int sim_add_machine(const char *path)
{
    strcpy(machines[num_machines].path, path);
    machines[num_machines].length = strlen(path);
    machines[num_machines].down = 0;
    return num_machines++;
}

/* Let calls pass unseen, for what the simulator itself does to the files. */
void sim_pause(int pause) { running = !pause; }

void sim_advance(int64_t ns) { monotonic_ns += ns; }
void sim_jump(int64_t ns) { wall_offset_ns += ns; }
int64_t sim_now(void) { return monotonic_ns; }
int64_t sim_num_calls(void) { return num_calls; }

void sim_rule(int number, int machine, int kinds, const char *where, int skip, int times, int error, int half, int64_t delay_ns)
{
    struct rule *rule = &rules[number];
    *rule = (struct rule){machine, kinds, skip, times, error, half, delay_ns, 0, ""};
    snprintf(rule->where, sizeof rule->where, "%s", where);
}

int64_t sim_hits(int number) { return rules[number].hits; }
struct file **sim_files(int *count) { *count = num_files; return files; }
struct name_change *sim_changes(int *count) { *count = num_changes; return changes; }

/* The process is gone: its locks are released, and nothing that it still does has an effect. */
void sim_down(int machine)
{
    machines[machine].down = 1;
    for (int fd = 0; fd <= highest_fd; fd++)
        if ((fds[fd].file || fds[fd].directory) && fds[fd].machine == machine) {
            dup3(null_fd, fd, O_CLOEXEC);
            free(fds[fd].directory);
            fds[fd].file = NULL;
            fds[fd].directory = NULL;
        }
}

void sim_up(int machine) { machines[machine].down = 0; }

static void forget_writes(struct file *file, int lost_too)
{
    int kept = 0;
    for (int i = 0; i < file->num_writes; i++) {
        struct page_write *write = &file->writes[i];
        if (write->lost && !lost_too)
            file->writes[kept++] = *write;
        else
            free(write->before);
    }
    file->num_writes = kept;
}

/* All that the files of a machine that is down show is on its disk now. */
void sim_settle(int machine)
{
    int kept = 0;
    for (int i = 0; i < num_files; i++) {
        struct file *file = files[i];
        if (file->machine == machine) {
            forget_writes(file, 1);
            REAL(close)(file->fd);
            free(file->writes);
            free(file->sizes);
            free(file);
        } else
            files[kept++] = file;
    }
    num_files = kept;
    kept = 0;
    for (int i = 0; i < num_changes; i++)
        if (changes[i].machine == machine) {
            free(changes[i].path);
            free(changes[i].new_path);
        } else
            changes[kept++] = changes[i];
    num_changes = kept;
}

void sim_end(void)
{
    for (int machine = 0; machine < num_machines; machine++) {
        sim_down(machine);
        sim_settle(machine);
    }
    num_machines = 0;
    running = 0;
}

/* ---- looking at a call */

static int machine_of(const char *path)
{
    for (int i = 0; running && i < num_machines; i++) {
        size_t n = machines[i].length;
        if (!strncmp(path, machines[i].path, n) && (path[n] == '/' || !path[n]))
            return i;
    }
    return -1;
}

/* What a call of a machine comes to: 0 it passes, -1 it writes half, or the errno with which it fails. */
static int fault(int machine, enum kind kind, const char *path)
{
    if (machine < 0)
        return 0;
    num_calls++;
    if (machines[machine].down)
        return EIO;
    for (int i = 0; i < MAX_RULES; i++) {
        struct rule *rule = &rules[i];
        if (!rule->times || rule->machine != machine || !(rule->kinds & kind) || !strstr(path, rule->where))
            continue;
        if (rule->skip > 0) {
            rule->skip--;
            continue;
        }
        if (rule->times > 0)
            rule->times--;
        rule->hits++;
        monotonic_ns += rule->delay_ns;
        if (rule->half || rule->error)
            return rule->half ? -1 : rule->error;
    }
    return 0;
}

static const char *path_of_fd(int fd)
{
    static char path[PATH_MAX];
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    return path;
}

static int fault_of_fd(int fd, enum kind kind)
{
    if (fd < 0 || fd >= MAX_FDS || !(fds[fd].file || fds[fd].directory))
        return 0;
    int machine = fds[fd].machine;
    for (int i = 0; i < MAX_RULES; i++)
        if (rules[i].times && rules[i].machine == machine && rules[i].kinds & kind)
            return fault(machine, kind, path_of_fd(fd));
    return fault(machine, kind, "");
}

static char *absolute(int at, const char *path)
{
    static char buffer[2][PATH_MAX];
    static int turn;
    char *out = buffer[turn ^= 1];
    if (path[0] == '/' || at == AT_FDCWD)
        snprintf(out, PATH_MAX, "%s", path);
    else
        snprintf(out, PATH_MAX, "%s/%s", path_of_fd(at), path);
    return out;
}

static int fails(int error)
{
    if (error <= 0)
        return 0;
    errno = error;
    return 1;
}

/* ---- files */

static struct file *file_of_fd(int fd, int machine, int is_new)
{
    struct stat status;
    fstat(fd, &status);
    for (int i = num_files - 1; i >= 0; i--)
        if (files[i]->inode == status.st_ino)
            return files[i];
    struct file *file = calloc(1, sizeof *file);
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    *file = (struct file){.inode = status.st_ino, .machine = machine};
    file->fd = REAL(open)(link, O_RDWR | O_CLOEXEC);
    file->durable_size = is_new ? 0 : status.st_size;
    files = grown(files, &files_capacity, num_files + 1, sizeof *files);
    files[num_files++] = file;
    return file;
}

static void note_size(struct file *file, int64_t size)
{
    file->sizes = grown(file->sizes, &file->sizes_capacity, file->num_sizes + 1, sizeof *file->sizes);
    file->sizes[file->num_sizes++] = size;
}

static int64_t size_of(const struct file *file)
{
    struct stat status;
    return fstat(file->fd, &status) < 0 ? 0 : status.st_size;
}

/* Keep what a range holds now and will hold. `after` NULL: zeros. */
static void note_write(struct file *file, int64_t offset, int64_t size, const unsigned char *after)
{
    while (size > 0) {
        int32_t part = PAGE - offset % PAGE;
        if (part > size)
            part = size;
        int64_t page = offset / PAGE;
        for (int i = 0; i < file->num_writes; i++) /* the whole page is dirty again */
            if (file->writes[i].offset / PAGE == page)
                file->writes[i].lost = 0;
        file->writes = grown(file->writes, &file->writes_capacity, file->num_writes + 1, sizeof *file->writes);
        unsigned char *before = calloc(2, part);
        (void)!REAL(pread)(file->fd, before, part, offset);
        if (after)
            memcpy(before + part, after, part);
        file->writes[file->num_writes++] = (struct page_write){offset, part, 0, before, before + part};
        if (after)
            after += part;
        offset += part;
        size -= part;
    }
}

static ssize_t write_at(int fd, const void *data, size_t size, int64_t offset)
{
    struct file *file = fds[fd].file;
    int64_t length = size_of(file);
    note_write(file, offset, size, data);
    ssize_t written = REAL(pwrite)(file->fd, data, size, offset);
    if (written >= 0 && offset + written > length)
        note_size(file, offset + written);
    return written;
}

static int tracked(int fd) { return running && fd >= 0 && fd < MAX_FDS && fds[fd].file; }

#define INTERPOSE_WRITE(name, parameters, where, advance, ...)                         \
    ssize_t name parameters                                                            \
    {                                                                                  \
        if (!tracked(fd))                                                              \
            return REAL(name)(__VA_ARGS__);                                            \
        int error = fault_of_fd(fd, WRITE);                                            \
        if (fails(error))                                                              \
            return -1;                                                                 \
        if (error < 0 && size > 1)                                                     \
            size /= 2;                                                                 \
        ssize_t written = write_at(fd, data, size, where);                             \
        if (advance && written > 0)                                                    \
            lseek(fd, written, SEEK_CUR);                                              \
        return written;                                                                \
    }
INTERPOSE_WRITE(write, (int fd, const void *data, size_t size), lseek(fd, 0, SEEK_CUR), 1, fd, data, size)
INTERPOSE_WRITE(pwrite, (int fd, const void *data, size_t size, off_t offset), offset, 0, fd, data, size, offset)
INTERPOSE_WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t offset), offset, 0, fd, data, size, offset)

#define INTERPOSE_READ(name, parameters, ...)                                          \
    ssize_t name parameters                                                            \
    {                                                                                  \
        if (tracked(fd) && fails(fault_of_fd(fd, READ)))                               \
            return -1;                                                                 \
        return REAL(name)(__VA_ARGS__);                                                \
    }
INTERPOSE_READ(read, (int fd, void *data, size_t size), fd, data, size)
INTERPOSE_READ(pread, (int fd, void *data, size_t size, off_t offset), fd, data, size, offset)
INTERPOSE_READ(pread64, (int fd, void *data, size_t size, off64_t offset), fd, data, size, offset)
INTERPOSE_READ(preadv, (int fd, const struct iovec *parts, int count, off_t offset), fd, parts, count, offset)
INTERPOSE_READ(preadv64, (int fd, const struct iovec *parts, int count, off64_t offset), fd, parts, count, offset)

/* Without these, Python copies files by read and write. */
ssize_t sendfile(int to, int from, off_t *offset, size_t size)
{
    (void)from, (void)offset, (void)size, (void)to;
    errno = EINVAL;
    return -1;
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size)
{
    (void)from, (void)offset, (void)size, (void)to;
    errno = EINVAL;
    return -1;
}

#define INTERPOSE_RESIZE(name, type)                                                   \
    int name(int fd, type size)                                                        \
    {                                                                                  \
        if (tracked(fd)) {                                                             \
            struct file *file = fds[fd].file;                                          \
            int64_t before = size_of(file);                                            \
            if (fails(fault_of_fd(fd, RESIZE)))                                        \
                return -1;                                                             \
            if (size < before)                                                         \
                note_write(file, size, before - size, NULL);                           \
            if (size != before)                                                        \
                note_size(file, size);                                                 \
        }                                                                              \
        return REAL(name)(fd, size);                                                   \
    }
INTERPOSE_RESIZE(ftruncate, off_t)
INTERPOSE_RESIZE(ftruncate64, off64_t)

static void forget_changes_in(const char *directory)
{
    size_t n = strlen(directory);
    int kept = 0;
    for (int i = 0; i < num_changes; i++) {
        struct name_change *change = &changes[i];
        int inside = 0;
        for (int side = 0; side < 2; side++) {
            const char *path = side ? change->new_path : change->path;
            inside |= path && !strncmp(path, directory, n) && path[n] == '/' && !strchr(path + n + 1, '/');
        }
        if (inside) {
            free(change->path);
            free(change->new_path);
        } else
            changes[kept++] = *change;
    }
    num_changes = kept;
}

static int sync_fd(int fd)
{
    int error = fault_of_fd(fd, SYNC);
    struct file *file = fds[fd].file;
    if (fails(error)) {
        for (int i = 0; file && i < file->num_writes; i++)
            file->writes[i].lost = 1;
        return -1;
    }
    if (file) {
        forget_writes(file, 0);
        file->num_sizes = 0;
        file->durable_size = size_of(file);
    } else
        forget_changes_in(fds[fd].directory);
    return 0;
}

#define INTERPOSE_SYNC(name)                                                           \
    int name(int fd)                                                                   \
    {                                                                                  \
        if (running && fd >= 0 && fd < MAX_FDS && (fds[fd].file || fds[fd].directory)) \
            return sync_fd(fd);                                                        \
        return REAL(name)(fd);                                                         \
    }
INTERPOSE_SYNC(fsync)
INTERPOSE_SYNC(fdatasync)

int close(int fd)
{
    if (fd >= 0 && fd < MAX_FDS) {
        free(fds[fd].directory);
        fds[fd].directory = NULL;
        fds[fd].file = NULL;
    }
    return REAL(close)(fd);
}

/* ---- names */

static void note_change(enum change what, int machine, uint64_t inode, uint64_t replaced, const char *path, const char *new_path)
{
    changes = grown(changes, &changes_capacity, num_changes + 1, sizeof *changes);
    changes[num_changes++] =
        (struct name_change){what, machine, inode, replaced, strdup(path), new_path ? strdup(new_path) : NULL};
    for (int side = 0; side < 2; side++) { /* a directory changes at a simulated time */
        const char *name = side ? new_path : path;
        if (!name)
            continue;
        char directory[PATH_MAX];
        snprintf(directory, sizeof directory, "%s", name);
        *strrchr(directory, '/') = 0;
        int64_t now = monotonic_ns + wall_offset_ns;
        struct timespec times[2] = {{now / 1000000000, now % 1000000000}, {now / 1000000000, now % 1000000000}};
        utimensat(AT_FDCWD, directory, times, 0);
    }
}

static uint64_t inode_of(const char *path)
{
    struct stat status;
    return lstat(path, &status) < 0 ? 0 : status.st_ino;
}

/* A file that loses its name may get it back: keep its inode. */
static void keep(const char *path, int machine)
{
    struct stat status;
    if (lstat(path, &status) < 0 || !S_ISREG(status.st_mode))
        return;
    int fd = REAL(open)(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        file_of_fd(fd, machine, 0);
        REAL(close)(fd);
    }
}

static int opened(int at, const char *given, int flags, mode_t permissions)
{
    const char *path = absolute(at, given);
    int machine = machine_of(path);
    if (machine < 0)
        return -2;
    int existed = inode_of(path) != 0, makes = flags & O_CREAT && !existed;
    if (fails(fault(machine, makes ? CREATE : OPEN, path)))
        return -1;
    int truncates = flags & O_TRUNC && existed;
    if (truncates) { /* as a resize, which is noted */
        int fd = REAL(open)(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0) {
            fds[fd].file = file_of_fd(fd, machine, 0);
            fds[fd].machine = machine;
            ftruncate(fd, 0);
            close(fd);
        }
    }
    int fd = REAL(open)(path, flags & ~O_TRUNC, permissions);
    if (fd < 0 || fd >= MAX_FDS)
        return fd;
    struct stat status;
    fstat(fd, &status);
    fds[fd].machine = machine;
    if (fd > highest_fd)
        highest_fd = fd;
    if (S_ISDIR(status.st_mode))
        fds[fd].directory = strdup(path);
    else if (S_ISREG(status.st_mode)) {
        fds[fd].file = file_of_fd(fd, machine, makes);
        if (makes)
            note_change(CREATED, machine, status.st_ino, 0, path, NULL);
    }
    return fd;
}

#define INTERPOSE_OPEN(name, parameters, at, ...)                                      \
    int name parameters                                                                \
    {                                                                                  \
        mode_t permissions = 0;                                                        \
        if (__OPEN_NEEDS_MODE(flags)) {                                                \
            va_list rest;                                                              \
            va_start(rest, flags);                                                     \
            permissions = va_arg(rest, mode_t);                                        \
            va_end(rest);                                                              \
        }                                                                              \
        if (running && !strcmp(path, "/dev/urandom"))                                  \
            path = "/dev/zero"; /* from which SQLite seeds its own random numbers */   \
        int fd = running ? opened(at, path, flags, permissions) : -2;                  \
        return fd == -2 ? REAL(name)(__VA_ARGS__, permissions) : fd;                   \
    }
INTERPOSE_OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, flags)
INTERPOSE_OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, flags)
INTERPOSE_OPEN(openat, (int at, const char *path, int flags, ...), at, at, path, flags)
INTERPOSE_OPEN(openat64, (int at, const char *path, int flags, ...), at, at, path, flags)

static int removed(int at, const char *given, int directory)
{
    const char *path = absolute(at, given);
    int machine = machine_of(path);
    if (machine < 0)
        return -2;
    if (fails(fault(machine, REMOVE, path)))
        return -1;
    uint64_t inode = inode_of(path);
    if (!directory)
        keep(path, machine);
    int result = directory ? REAL(rmdir)(path) : REAL(unlink)(path);
    if (!result)
        note_change(directory ? REMOVED_DIRECTORY : REMOVED, machine, inode, 0, path, NULL);
    return result;
}

int unlink(const char *path)
{
    int result = removed(AT_FDCWD, path, 0);
    return result == -2 ? REAL(unlink)(path) : result;
}

int rmdir(const char *path)
{
    int result = removed(AT_FDCWD, path, 1);
    return result == -2 ? REAL(rmdir)(path) : result;
}

int unlinkat(int at, const char *path, int flags)
{
    int result = removed(at, path, flags & AT_REMOVEDIR);
    return result == -2 ? REAL(unlinkat)(at, path, flags) : result;
}

int mkdir(const char *path, mode_t permissions)
{
    int machine = machine_of(path);
    if (machine >= 0 && fails(fault(machine, CREATE, path)))
        return -1;
    int result = REAL(mkdir)(path, permissions);
    if (machine >= 0 && !result)
        note_change(MADE_DIRECTORY, machine, 0, 0, path, NULL);
    return result;
}

int rename(const char *path, const char *new_path)
{
    int machine = machine_of(path);
    if (machine < 0)
        return REAL(rename)(path, new_path);
    if (fails(fault(machine, RENAME, new_path)))
        return -1;
    uint64_t inode = inode_of(path), replaced = inode_of(new_path);
    keep(new_path, machine);
    int result = REAL(rename)(path, new_path);
    if (!result)
        note_change(RENAMED, machine, inode, replaced, path, new_path);
    return result;
}

int link(const char *path, const char *new_path)
{
    int machine = machine_of(new_path);
    if (machine >= 0 && fails(fault(machine, CREATE, new_path)))
        return -1;
    int result = REAL(link)(path, new_path);
    if (machine >= 0 && !result)
        note_change(LINKED, machine, inode_of(new_path), 0, new_path, NULL);
    return result;
}

/* ---- time and random numbers */

int clock_gettime(clockid_t clock, struct timespec *out)
{
    if (!running || clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID)
        return REAL(clock_gettime)(clock, out);
    monotonic_ns += 1000; /* time passes, so that no loop waits for it in vain */
    int64_t now = clock == CLOCK_REALTIME ? monotonic_ns + wall_offset_ns : monotonic_ns;
    *out = (struct timespec){now / 1000000000, now % 1000000000};
    return 0;
}

ssize_t getrandom(void *data, size_t size, unsigned int flags)
{
    if (!running)
        return REAL(getrandom)(data, size, flags);
    for (size_t i = 0; i < size; i++) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        ((unsigned char *)data)[i] = random_state >> 33;
    }
    return size;
}
