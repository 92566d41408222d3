/* Runs a fuzz target over saved inputs without a fuzzer: `replay PATH...`, files or folders of files. A finding ends the
 * process, so the last name printed is the input that caused it. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int run_file(const char *path) {
    FILE *f = fopen(path, "rb");
    struct stat st;
    if (!f || fstat(fileno(f), &st) != 0) {
        perror(path);
        exit(1);
    }
    /* Exactly as large as the input, so that AddressSanitizer sees the first byte read past it. */
    size_t size = (size_t)st.st_size;
    uint8_t *data = malloc(size ? size : 1);
    if (!data || fread(data, 1, size, f) != size) {
        perror(path);
        exit(1);
    }
    fclose(f);
    printf("%s\n", path);
    fflush(stdout);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 1;
}

static int run_folder(const char *path) {
    struct dirent **entry;
    int n = scandir(path, &entry, NULL, alphasort), n_run = 0;
    if (n < 0) {
        perror(path);
        exit(1);
    }
    for (int i = 0; i < n; i++) {
        char file[4096];
        if (entry[i]->d_name[0] != '.') {
            snprintf(file, sizeof file, "%s/%s", path, entry[i]->d_name);
            n_run += run_file(file);
        }
        free(entry[i]);
    }
    free(entry);
    return n_run;
}

int main(int argc, char **argv) {
    int n = 0;
    for (int i = 1; i < argc; i++) {
        struct stat st;
        if (stat(argv[i], &st) != 0) {
            perror(argv[i]);
            return 1;
        }
        n += S_ISDIR(st.st_mode) ? run_folder(argv[i]) : run_file(argv[i]);
    }
    printf("%d passed, 0 failed, 0 skipped\n", n);
    return n == 0;
}
