/* Preloaded into a job under test: counts its file operations below one directory and lets one of them go wrong.
 *
 * All processes of the job share one page of state (a mapped file), so the n-th operation is the n-th of the job, whichever
 * process makes it: a writer process, a background thread or the main one. What strace can do to one thread, this can do to
 * a whole job. It also records what was done, with the bytes, and can hide fresh entries as a network file system does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PASS, KILL_JOB, FAIL, FAIL_ALWAYS, STOP, DELAY, TEAR, KILL_SELF };
enum { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, LINK = 16, UNLINK = 32, MKDIR = 64, TRUNCATE = 128, DIRECT = 256, FOLDER = 512 };

struct state {
    int64_t count;       /* operations so far */
    int64_t target;      /* the one that goes wrong; 0: none */
    int32_t action;
    int32_t error;       /* errno of FAIL */
    int32_t session;     /* only processes of this session take part; 0: all */
    int32_t kinds;       /* which operations count */
    int32_t delay_ms;
    int32_t hide_ms;     /* entries younger than this are not seen by hidden_from */
    int32_t hidden_from; /* session that does not see them */
    int32_t record;
    char root[1024];
    char match[256];     /* only paths that contain this; "": all */
    char log[1024];
};

static struct state *shared;

static void init(void) __attribute__((constructor));
static void init(void) {
    const char *path = getenv("SAFE_CKPT_SHIM");
    if (!path) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (found != MAP_FAILED) shared = found;
}

static int taking_part(void) {
    return shared && shared->root[0] && (!shared->session || getsid(0) == shared->session);
}

static const char *path_of(int dirfd, const char *path, char *buffer) {
    if (path[0] == '/') return path;
    char link[64], base[PATH_MAX];
    if (dirfd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
    ssize_t size = readlink(link, base, sizeof base - 1);
    if (size < 0) return path;
    base[size] = 0;
    snprintf(buffer, PATH_MAX, "%s/%s", base, path);
    return buffer;
}

static const char *path_of_fd(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, buffer, PATH_MAX - 1);
    if (size < 0) return "";
    buffer[size] = 0;
    return buffer;
}

static int below(const char *path) {
    size_t size = strlen(shared->root);
    return !strncmp(path, shared->root, size) && (path[size] == '/' || !path[size]);
}

static int counts(const char *path, int kind) {
    if (!(shared->kinds & kind) || !below(path)) return 0;
    return !shared->match[0] || strstr(path, shared->match) != NULL;
}

static void record(const char *name, const char *path, const char *other, const void *data, size_t size, off_t offset) {
    if (!shared->record) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, shared->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return;
    char head[3 * PATH_MAX];
    int length = snprintf(head, sizeof head, "%s\t%s\t%s\t%lld\t%zu\n", name, path, other ? other : "", (long long)offset, size);
    struct iovec parts[3] = {{head, (size_t)length}, {(void *)data, size}, {"\n", 1}};
    syscall(SYS_writev, fd, parts, 3); /* O_APPEND: one record is written as a whole */
    syscall(SYS_close, fd);
}

/* Returns 0 to go on, -1 to fail with errno set, 1 for a write that is to be torn. */
static int operation(const char *path, int kind) {
    if (!taking_part() || !counts(path, kind)) return 0;
    int64_t number = __atomic_add_fetch(&shared->count, 1, __ATOMIC_SEQ_CST);
    int due = shared->target && (shared->action == FAIL_ALWAYS ? number >= shared->target : number == shared->target);
    if (!due) return 0;
    switch (shared->action) {
    case KILL_JOB:
        kill(0, SIGKILL);
        pause();
        break;
    case KILL_SELF:
        raise(SIGKILL);
        break;
    case FAIL:
    case FAIL_ALWAYS:
        errno = shared->error;
        return -1;
    case STOP:
        kill(getpid(), SIGSTOP);
        break;
    case DELAY: {
        struct timespec rest = {shared->delay_ms / 1000, (shared->delay_ms % 1000) * 1000000L};
        nanosleep(&rest, NULL);
        break;
    }
    case TEAR:
        if (kind == WRITE) return 1;
        kill(0, SIGKILL);
        pause();
    }
    return 0;
}

static int recorded(const char *path) { return taking_part() && below(path); }

#define REAL(name, ...) ((int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

/* ---------------------------------------------------------------- hiding */

#define OWN 4096
static uint64_t own[OWN];

static uint64_t hash_of(const char *path) {
    uint64_t value = 1469598103934665603ull;
    for (; *path; path++) value = (value ^ (unsigned char)*path) * 1099511628211ull;
    return value ? value : 1;
}

static void remember(const char *path) { own[hash_of(path) % OWN] = hash_of(path); }

static int hidden(const char *path) {
    if (!shared || !shared->hide_ms || !shared->hidden_from || getsid(0) != shared->hidden_from || !below(path)) return 0;
    char part[PATH_MAX];
    snprintf(part, sizeof part, "%s", path);
    for (char *end = part + strlen(part); end > part + strlen(shared->root); end = strrchr(part, '/')) {
        *end = 0;
        if (!below(part) || !part[strlen(shared->root)]) break;
        if (own[hash_of(part) % OWN] == hash_of(part)) continue;
        struct statx found;
        if (syscall(SYS_statx, AT_FDCWD, part, AT_SYMLINK_NOFOLLOW, STATX_BTIME | STATX_CTIME, &found)) continue;
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        struct statx_timestamp born = found.stx_mask & STATX_BTIME ? found.stx_btime : found.stx_ctime;
        int64_t age = (now.tv_sec - born.tv_sec) * 1000 + ((int64_t)now.tv_nsec - born.tv_nsec) / 1000000;
        if (age < shared->hide_ms) return 1;
    }
    return 0;
}

/* ---------------------------------------------------------------- what is watched */

static int open_at(int dirfd, const char *path, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *full = shared ? path_of(dirfd, path, buffer) : path;
    if (shared && (flags & O_CREAT) && recorded(full)) {
        if (operation(full, OPEN)) return -1;
        remember(full);
        record(flags & O_EXCL ? "create_new" : flags & O_TRUNC ? "create_empty" : "create", full, NULL, NULL, 0, 0);
    } else if (shared && hidden(full)) {
        errno = ENOENT;
        return -1;
    }
    return (int)syscall(SYS_openat, dirfd, path, flags, mode);
}

#define OPENAT(name)                                                                                                          \
    int name(int dirfd, const char *path, int flags, ...) {                                                                   \
        va_list list;                                                                                                         \
        va_start(list, flags);                                                                                                \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, mode_t) : 0;                                             \
        va_end(list);                                                                                                         \
        return open_at(dirfd, path, flags | O_LARGEFILE, mode);                                                               \
    }
#define OPEN_(name)                                                                                                           \
    int name(const char *path, int flags, ...) {                                                                              \
        va_list list;                                                                                                         \
        va_start(list, flags);                                                                                                \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, mode_t) : 0;                                             \
        va_end(list);                                                                                                         \
        return open_at(AT_FDCWD, path, flags | O_LARGEFILE, mode);                                                            \
    }
OPENAT(openat)
OPENAT(openat64)
OPEN_(open)
OPEN_(open64)

static ssize_t written(const char *name, int fd, const void *data, size_t size, off_t offset) {
    char buffer[PATH_MAX];
    const char *path = shared ? path_of_fd(fd, buffer) : "";
    int torn = 0;
    if (shared && recorded(path)) {
        /* Only when they are asked for are direct writes of a kind of their own. */
        int direct = shared->kinds & DIRECT && fcntl(fd, F_GETFL) & O_DIRECT;
        torn = operation(path, direct ? DIRECT : WRITE);
        if (torn < 0) return -1;
        if (torn) size = size / 2 / 4096 * 4096;
        record(name, path, NULL, data, size, offset);
    }
    ssize_t done = offset < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, offset);
    if (torn) {
        kill(0, SIGKILL);
        pause();
    }
    return done;
}
ssize_t write(int fd, const void *data, size_t size) { return written("write", fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return written("pwrite", fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return written("pwrite", fd, data, size, offset); }

static int synced(int fd, long number) {
    char buffer[PATH_MAX];
    const char *path = shared ? path_of_fd(fd, buffer) : "";
    if (shared && recorded(path)) {
        struct stat found;
        int folder = shared->kinds & FOLDER && !fstat(fd, &found) && S_ISDIR(found.st_mode);
        if (operation(path, folder ? FOLDER : SYNC)) return -1;
        int done = (int)syscall(number, fd);
        record("sync", path, NULL, NULL, 0, 0); /* durable only once it has returned */
        return done;
    }
    return (int)syscall(number, fd);
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int truncated(int fd, off_t size) {
    char buffer[PATH_MAX];
    const char *path = shared ? path_of_fd(fd, buffer) : "";
    if (shared && recorded(path)) {
        if (operation(path, TRUNCATE)) return -1;
        record("truncate", path, NULL, NULL, 0, size);
    }
    return (int)syscall(SYS_ftruncate, fd, size);
}
int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncated(fd, size); }

int renameat2(int from, const char *source, int to, const char *target, unsigned int flags) {
    char one[PATH_MAX], other[PATH_MAX];
    if (shared) {
        const char *a = path_of(from, source, one), *b = path_of(to, target, other);
        if (recorded(b) || recorded(a)) {
            if (operation(recorded(b) ? b : a, RENAME)) return -1;
            remember(b);
            record(flags ? "exchange" : "rename", a, b, NULL, 0, 0);
        }
    }
    return (int)syscall(SYS_renameat2, from, source, to, target, flags);
}
int rename(const char *source, const char *target) { return renameat2(AT_FDCWD, source, AT_FDCWD, target, 0); }
int renameat(int from, const char *source, int to, const char *target) { return renameat2(from, source, to, target, 0); }

int linkat(int from, const char *source, int to, const char *target, int flags) {
    // A file that is open may get a further name by its entry in /proc, which is a link to its name.
    char opened[PATH_MAX];
    if (flags & AT_SYMLINK_FOLLOW && strncmp(source, "/proc/self/fd/", 14) == 0) {
        ssize_t size = readlink(source, opened, sizeof opened - 1);
        if (size > 0) {
            opened[size] = 0;
            if (access(opened, F_OK) == 0) { source = opened; from = AT_FDCWD; flags &= ~AT_SYMLINK_FOLLOW; }
        }
    }
    char one[PATH_MAX], other[PATH_MAX];
    if (shared) {
        const char *a = path_of(from, source, one), *b = path_of(to, target, other);
        if (recorded(b)) {
            if (operation(b, LINK)) return -1;
            remember(b);
            record("link", a, b, NULL, 0, 0);
        }
    }
    return (int)syscall(SYS_linkat, from, source, to, target, flags);
}
int link(const char *source, const char *target) { return linkat(AT_FDCWD, source, AT_FDCWD, target, 0); }

int symlinkat(const char *content, int to, const char *target) {
    char other[PATH_MAX];
    if (shared) {
        const char *b = path_of(to, target, other);
        if (recorded(b)) {
            if (operation(b, LINK)) return -1;
            remember(b);
            record("symlink", content, b, NULL, 0, 0);
        }
    }
    return (int)syscall(SYS_symlinkat, content, to, target);
}
int symlink(const char *content, const char *target) { return symlinkat(content, AT_FDCWD, target); }

int unlinkat(int dirfd, const char *path, int flags) {
    char buffer[PATH_MAX];
    if (shared) {
        const char *full = path_of(dirfd, path, buffer);
        if (recorded(full)) {
            if (operation(full, UNLINK)) return -1;
            record(flags & AT_REMOVEDIR ? "rmdir" : "unlink", full, NULL, NULL, 0, 0);
        }
    }
    return (int)syscall(SYS_unlinkat, dirfd, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dirfd, const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    if (shared) {
        const char *full = path_of(dirfd, path, buffer);
        if (recorded(full)) {
            if (operation(full, MKDIR)) return -1;
            remember(full);
            record("mkdir", full, NULL, NULL, 0, 0);
        }
    }
    return (int)syscall(SYS_mkdirat, dirfd, path, mode);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* ---------------------------------------------------------------- what can be hidden */

int fstatat(int dirfd, const char *path, struct stat *found, int flags) {
    char buffer[PATH_MAX];
    if (shared && shared->hide_ms && path[0] && hidden(path_of(dirfd, path, buffer))) {
        errno = ENOENT;
        return -1;
    }
    return (int)syscall(SYS_newfstatat, dirfd, path, found, flags);
}
int fstatat64(int dirfd, const char *path, struct stat64 *found, int flags) {
    return fstatat(dirfd, path, (struct stat *)found, flags);
}
int stat(const char *path, struct stat *found) { return fstatat(AT_FDCWD, path, found, 0); }
int lstat(const char *path, struct stat *found) { return fstatat(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int stat64(const char *path, struct stat64 *found) { return fstatat(AT_FDCWD, path, (struct stat *)found, 0); }
int lstat64(const char *path, struct stat64 *found) {
    return fstatat(AT_FDCWD, path, (struct stat *)found, AT_SYMLINK_NOFOLLOW);
}
