/* Copies the upper directory of an overlay (fork), or a layer, with its whiteouts and opaque marks.
 *
 * The source was written by untrusted commands and may change meanwhile: every step is relative to an open
 * directory and follows no link. */
#include <sys/sendfile.h>
#include <sys/xattr.h>
#include "sandboxd.h"
#define DEPTH_MAX 256 /* each level holds three descriptors */

struct copy {
    const char *opaque; /* marks a directory that hides the one below; the name depends on who mounted */
    bool give;    /* to `owner` */
    uid_t owner;
    bool merge;   /* the target may hold files: ours replace them, whiteouts delete them; mounts are left out */
    dev_t device; /* of the source */
};

static int copy_dir(int from, int to, const struct copy *how, int depth);

/* Owner, mode and times of a copied file or directory. */
static int finish(int fd, const struct stat *info, const struct copy *how) {
    const struct timespec times[2] = {info->st_atim, info->st_mtim};
    if (how->give && fchown(fd, how->owner, how->owner)) return -1;
    return fchmod(fd, info->st_mode & 01777) || futimens(fd, times) ? -1 : 0;
}

/* What is not a hole. -1 with errno. */
static int copy_data(int in, int out, const struct stat *info) {
    off_t at = 0, end;
    if ((off_t)info->st_blocks * 512 >= info->st_size) { /* no holes, as nearly always: much quicker */
        ssize_t done = 0;
        for (; at < info->st_size && (done = sendfile(out, in, NULL, (size_t)(info->st_size - at))) > 0; at += done) {}
        return done < 0 ? -1 : 0;
    }
    while ((at = lseek(in, at, SEEK_DATA)) >= 0) {
        if ((end = lseek(in, at, SEEK_HOLE)) < 0 || lseek(out, at, SEEK_SET) < 0) return -1;
        while (at < end) {
            ssize_t done = sendfile(out, in, &at, (size_t)(end - at));
            if (done < 0) return -1;
            if (done == 0) return 0; /* it became shorter meanwhile */
        }
    }
    return errno == ENXIO ? ftruncate(out, info->st_size) : -1; /* nothing further but a hole */
}

static int copy_file(int from, int to, const char *name, const struct stat *info, const struct copy *how) {
    int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (in < 0) return errno == ENOENT ? 0 : -1;
    int out = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int bad = out < 0 || copy_data(in, out, info) || finish(out, info, how);
    close(in);
    if (out >= 0) close(out);
    return bad ? -1 : 0;
}

static int copy_subdir(int from, int to, const char *name, const struct stat *info, const struct copy *how, int depth) {
    char value[8];
    if (mkdirat(to, name, 0700) && !(how->merge && errno == EEXIST)) return -1;
    int in = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int out = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int bad = in < 0 || out < 0 || copy_dir(in, out, how, depth + 1);
    if (!bad && !how->merge && fgetxattr(in, how->opaque, value, sizeof value) == 1) bad = fsetxattr(out, how->opaque, value, 1, 0);
    if (!bad) bad = finish(out, info, how);
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    return bad ? -1 : 0;
}

/* Whether a directory and what is below it in the target become one. */
static bool is_merged(int from, int to, const char *name, const struct stat *info, const struct copy *how) {
    struct stat old;
    char value[8];
    if (!S_ISDIR(info->st_mode) || fstatat(to, name, &old, AT_SYMLINK_NOFOLLOW) || !S_ISDIR(old.st_mode)) return false;
    int in = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    bool opaque = in >= 0 && fgetxattr(in, how->opaque, value, sizeof value) == 1;
    if (in >= 0) close(in);
    return !opaque;
}

static int copy_entry(int from, int to, const char *name, const struct copy *how, int depth) {
    struct stat info;
    char text[4096];
    if (fstatat(from, name, &info, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : -1;
    if (how->merge && S_ISDIR(info.st_mode) && info.st_dev != how->device) return 0;
    if (how->merge && !is_merged(from, to, name, &info, how) && remove_entry(to, name)) return -1;
    if (S_ISDIR(info.st_mode)) return copy_subdir(from, to, name, &info, how, depth);
    if (S_ISREG(info.st_mode)) return copy_file(from, to, name, &info, how);
    if (S_ISCHR(info.st_mode) && info.st_rdev == 0) /* whiteout: deleted below */
        return how->merge ? 0 : mknodat(to, name, S_IFCHR, 0);
    if (S_ISSOCK(info.st_mode)) return 0; /* its process is not copied either */
    if (S_ISFIFO(info.st_mode) && mknodat(to, name, S_IFIFO | (info.st_mode & 0777), 0)) return -1;
    if (S_ISLNK(info.st_mode)) {
        ssize_t len = readlinkat(from, name, text, sizeof text - 1);
        if (len < 0) return -1;
        text[len] = 0;
        if (symlinkat(text, to, name)) return -1;
    }
    return how->give ? fchownat(to, name, how->owner, how->owner, AT_SYMLINK_NOFOLLOW) : 0;
}

static int copy_dir(int from, int to, const struct copy *how, int depth) {
    int bad = 0, fd = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* own offset, and closedir closes it */
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    errno = depth > DEPTH_MAX ? ELOOP : errno;
    if (!stream || depth > DEPTH_MAX) return -1;
    for (struct dirent *entry; !bad && (entry = readdir(stream));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            bad = copy_entry(from, to, entry->d_name, how, depth);
    int error = errno;
    closedir(stream);
    errno = error;
    return bad;
}

int copy_tree(int from, int to, bool trusted_xattr, bool give) {
    struct copy how = {trusted_xattr ? "trusted.overlay.opaque" : "user.overlay.opaque", give, OUTSIDE_COMMAND, false, 0};
    struct stat info;
    return fstat(from, &info) || copy_dir(from, to, &how, 0) || finish(to, &info, &how) ? -1 : 0;
}

int merge_tree(int from, int to, uid_t owner) {
    struct copy how = {"user.overlay.opaque", true, owner, true, 0};
    struct stat info;
    if (fstat(from, &info)) return -1;
    how.device = info.st_dev;
    return copy_dir(from, to, &how, 0) || finish(to, &info, &how) ? -1 : 0;
}
