/* Whole directory trees: emptied, given to a user, measured. Commands may change them meanwhile, so every step is
 * relative to an open directory and follows no link. */
#include "sandboxd.h"
#define DEPTH_MAX 256 /* each level holds one or two descriptors */
#define UNKNOWN_BYTES (1ull << 60) /* more than any limit: what lies too deep must not escape it */

/* What is done with each entry; a directory is visited before its entries, or after them if `last`. */
struct visitor {
    int (*entry)(int dir, const char *name, const struct stat *info, void *state);
    bool last;
    void *state;
    dev_t device; /* not 0: directories of other file systems are left out */
};

static int walk(int dir, const struct visitor *visitor, int depth);

static int visit(int dir, const char *name, const struct visitor *visitor, int depth) {
    struct stat info;
    if (fstatat(dir, name, &info, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : -1;
    if (visitor->device && S_ISDIR(info.st_mode) && info.st_dev != visitor->device) return 0;
    if (!visitor->last && visitor->entry(dir, name, &info, visitor->state)) return errno == ENOENT ? 0 : -1;
    if (S_ISDIR(info.st_mode)) {
        int inner = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (inner < 0) return errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? 0 : -1; /* no directory any more */
        int bad = walk(inner, visitor, depth + 1), error = errno;
        close(inner);
        errno = error;
        if (bad) return -1;
    }
    if (visitor->last && visitor->entry(dir, name, &info, visitor->state)) return errno == ENOENT ? 0 : -1;
    return 0;
}

static int walk(int dir, const struct visitor *visitor, int depth) {
    int bad = 0, fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* own offset, and closedir closes it */
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    errno = depth > DEPTH_MAX ? ENAMETOOLONG : errno;
    if (!stream || depth > DEPTH_MAX) {
        if (stream) closedir(stream);
        return -1;
    }
    for (struct dirent *entry; !bad && (entry = readdir(stream));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) bad = visit(dir, entry->d_name, visitor, depth);
    int error = errno;
    closedir(stream);
    errno = error;
    return bad;
}

static int remove_one(int dir, const char *name, const struct stat *info, void *state) {
    (void)state;
    if (unlinkat(dir, name, S_ISDIR(info->st_mode) ? AT_REMOVEDIR : 0) == 0) return 0;
    return errno == EBUSY ? 0 : -1; /* something is mounted there */
}

int remove_entry(int dir, const char *name) {
    const struct visitor remover = {remove_one, true, NULL, 0};
    return visit(dir, name, &remover, 0);
}

static dev_t device_of(int dir) {
    struct stat info;
    return fstat(dir, &info) ? 0 : info.st_dev;
}

int empty_tree(int dir) {
    const struct visitor remover = {remove_one, true, NULL, device_of(dir)};
    return walk(dir, &remover, 0);
}

static int give_one(int dir, const char *name, const struct stat *info, void *state) {
    const uid_t *owner = state;
    if (info->st_uid == *owner && info->st_gid == *owner) return 0;
    if (fchownat(dir, name, *owner, *owner, AT_SYMLINK_NOFOLLOW) == 0) return 0;
    return errno == EROFS ? 0 : -1; /* a file that is mounted there */
}

int give_tree(int dir, uid_t owner) {
    const struct visitor giver = {give_one, false, &owner, device_of(dir)};
    return fchown(dir, owner, owner) || walk(dir, &giver, 0) ? -1 : 0;
}

static int add_one(int dir, const char *name, const struct stat *info, void *state) {
    struct written *sums = state;
    (void)dir, (void)name;
    if (info->st_ctim.tv_sec < sums->since.tv_sec) return 0;
    if (info->st_ctim.tv_sec == sums->since.tv_sec && info->st_ctim.tv_nsec <= sums->since.tv_nsec) return 0;
    sums->bytes += (uint64_t)info->st_blocks * 512;
    sums->files++;
    return 0;
}

void measure_written(int dir, struct written *sums) {
    const struct visitor adder = {add_one, false, sums, device_of(dir)};
    sums->bytes = sums->files = 0;
    if (walk(dir, &adder, 0) && errno == ENAMETOOLONG) sums->bytes = UNKNOWN_BYTES; /* else counted the next time */
}
