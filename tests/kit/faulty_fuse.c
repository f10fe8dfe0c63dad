/* A FUSE file system that passes everything on to a directory and goes wrong when it is told to.
 *
 *     faulty_fuse DIRECTORY STATE MOUNTPOINT [options of FUSE]
 *
 * STATE is a file of the layout below, mapped by this process and by the one that gives the orders (folders.py). Times are
 * nanoseconds of CLOCK_MONOTONIC. Two names are never exchanged, and no flag of rename is understood, as with NFS.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 35
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

static struct state {
    long long count, eio_until, absent_until, hits;
    int bad_direct, no_statfs, no_links, no_fallocate, coarse_s;
    char absent[256];
} __attribute__((packed)) *state;
static int root;

static long long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

static int hit(int error) {
    state->hits++;
    return -error;
}

static int gate(const char *path) {
    state->count++;
    if (state->eio_until && now() < state->eio_until) return hit(EIO);
    if (path && state->absent[0] && now() < state->absent_until) {
        size_t length = strlen(state->absent);
        for (const char *at = path; (at = strstr(at, state->absent)); at++)
            if (at > path && at[-1] == '/' && (at[length] == 0 || at[length] == '/')) return hit(ENOENT);
    }
    return 0;
}

static const char *below(const char *path) { return path[1] ? path + 1 : "."; }

#define GATE(path) do { int refused = gate(path); if (refused) return refused; } while (0)
#define DONE(call) return (call) == -1 ? -errno : 0

static void coarsen(struct stat *found) {
    int by = state->coarse_s;
    if (by <= 0) return;
    struct timespec *times[] = {&found->st_atim, &found->st_mtim, &found->st_ctim};
    for (int i = 0; i < 3; i++) {
        times[i]->tv_sec -= times[i]->tv_sec % by;
        times[i]->tv_nsec = 0;
    }
}

static int do_getattr(const char *path, struct stat *found, struct fuse_file_info *file) {
    GATE(path);
    int bad = file ? fstat(file->fh, found) : fstatat(root, below(path), found, AT_SYMLINK_NOFOLLOW);
    if (bad) return -errno;
    coarsen(found);
    return 0;
}

static int do_readlink(const char *path, char *target, size_t size) {
    GATE(path);
    ssize_t length = readlinkat(root, below(path), target, size - 1);
    if (length < 0) return -errno;
    target[length] = 0;
    return 0;
}

static int do_mkdir(const char *path, mode_t mode) { GATE(path); DONE(mkdirat(root, below(path), mode)); }
static int do_unlink(const char *path) { GATE(path); DONE(unlinkat(root, below(path), 0)); }
static int do_rmdir(const char *path) { GATE(path); DONE(unlinkat(root, below(path), AT_REMOVEDIR)); }
static int do_symlink(const char *to, const char *path) { GATE(path); DONE(symlinkat(to, root, below(path))); }
static int do_mknod(const char *path, mode_t mode, dev_t dev) { GATE(path); DONE(mknodat(root, below(path), mode, dev)); }

static int do_rename(const char *from, const char *to, unsigned int flags) {
    GATE(from);
    GATE(to);
    if (flags) return -EINVAL;
    DONE(renameat(root, below(from), root, below(to)));
}

static int do_link(const char *from, const char *to) {
    GATE(from);
    GATE(to);
    if (state->no_links) return hit(EPERM);
    DONE(linkat(root, below(from), root, below(to), 0));
}

static int do_chmod(const char *path, mode_t mode, struct fuse_file_info *file) {
    GATE(path);
    DONE(file ? fchmod(file->fh, mode) : fchmodat(root, below(path), mode, 0));
}

static int do_chown(const char *path, uid_t user, gid_t group, struct fuse_file_info *file) {
    GATE(path);
    DONE(file ? fchown(file->fh, user, group) : fchownat(root, below(path), user, group, AT_SYMLINK_NOFOLLOW));
}

static int do_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *file) {
    GATE(path);
    DONE(file ? futimens(file->fh, times) : utimensat(root, below(path), times, AT_SYMLINK_NOFOLLOW));
}

static int do_truncate(const char *path, off_t size, struct fuse_file_info *file) {
    GATE(path);
    if (file) DONE(ftruncate(file->fh, size));
    int opened = openat(root, below(path), O_WRONLY);
    if (opened < 0) return -errno;
    int bad = ftruncate(opened, size) ? -errno : 0;
    close(opened);
    return bad;
}

static int opened(const char *path, struct fuse_file_info *file, int flags, mode_t mode) {
    GATE(path);
    int found = openat(root, below(path), flags & ~(O_DIRECT | O_NOFOLLOW), mode);
    if (found < 0) return -errno;
    file->fh = found;
    return 0;
}

static int do_open(const char *path, struct fuse_file_info *file) { return opened(path, file, file->flags, 0); }

static int do_create(const char *path, mode_t mode, struct fuse_file_info *file) {
    return opened(path, file, file->flags | O_CREAT, mode);
}

static int do_read(const char *path, char *bytes, size_t size, off_t at, struct fuse_file_info *file) {
    GATE(path);
    ssize_t length = pread(file->fh, bytes, size, at);
    return length < 0 ? -errno : length;
}

static int do_write(const char *path, const char *bytes, size_t size, off_t at, struct fuse_file_info *file) {
    GATE(path);
    if (state->bad_direct && (file->flags & O_DIRECT)) return hit(EINVAL);
    ssize_t length = pwrite(file->fh, bytes, size, at);
    return length < 0 ? -errno : length;
}

static int do_statfs(const char *path, struct statvfs *found) {
    GATE(path);
    if (fstatvfs(root, found)) return -errno;
    if (state->no_statfs) {
        hit(0);
        memset(found, 0, sizeof *found);
    }
    return 0;
}

static int do_flush(const char *path, struct fuse_file_info *file) { GATE(path); DONE(close(dup(file->fh))); }
static int do_release(const char *path, struct fuse_file_info *file) { close(file->fh); return 0; }

static int do_fsync(const char *path, int data_only, struct fuse_file_info *file) {
    GATE(path);
    DONE(data_only ? fdatasync(file->fh) : fsync(file->fh));
}

static int do_opendir(const char *path, struct fuse_file_info *file) {
    return opened(path, file, O_RDONLY | O_DIRECTORY, 0);
}

static int do_readdir(const char *path, void *out, fuse_fill_dir_t add, off_t at, struct fuse_file_info *file,
                      enum fuse_readdir_flags flags) {
    GATE(path);
    DIR *folder = fdopendir(openat(file->fh, ".", O_RDONLY | O_DIRECTORY));
    if (!folder) return -errno;
    int lose = state->absent[0] && now() < state->absent_until;
    for (struct dirent *entry; (entry = readdir(folder));)
        if (!lose || strcmp(entry->d_name, state->absent)) {
            struct stat kind = {.st_ino = entry->d_ino, .st_mode = entry->d_type << 12};
            add(out, entry->d_name, &kind, 0, 0);
        }
    closedir(folder);
    return 0;
}

static int do_access(const char *path, int mode) { GATE(path); DONE(faccessat(root, below(path), mode, 0)); }

static int do_fallocate(const char *path, int mode, off_t at, off_t length, struct fuse_file_info *file) {
    GATE(path);
    if (state->no_fallocate) return hit(EOPNOTSUPP);
    DONE(fallocate(file->fh, mode, at, length));
}

static void *do_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    config->use_ino = 1;
    config->hard_remove = 0;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = do_init, .getattr = do_getattr, .readlink = do_readlink, .mkdir = do_mkdir, .unlink = do_unlink,
    .rmdir = do_rmdir, .symlink = do_symlink, .mknod = do_mknod, .rename = do_rename, .link = do_link,
    .chmod = do_chmod, .chown = do_chown, .utimens = do_utimens, .truncate = do_truncate, .open = do_open,
    .create = do_create, .read = do_read, .write = do_write, .statfs = do_statfs, .flush = do_flush,
    .release = do_release, .fsync = do_fsync, .opendir = do_opendir, .readdir = do_readdir,
    .releasedir = do_release, .fsyncdir = do_fsync, .access = do_access, .fallocate = do_fallocate,
};

int main(int count, char **words) {
    if (count < 4) return 2;
    root = open(words[1], O_RDONLY | O_DIRECTORY);
    int file = open(words[2], O_RDWR);
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (root < 0 || file < 0 || state == MAP_FAILED) {
        perror("faulty_fuse");
        return 2;
    }
    umask(0);
    words[2] = words[0];
    return fuse_main(count - 2, words + 2, &operations, NULL);
}
