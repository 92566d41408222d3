/* What qlane bench writes: a table, CSV, and a plot of both speeds over context. */
#include "runtime/cli/cli.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static double value(const json_t *object, const char *key) { return json_number_value(json_object_get(object, key)); }

/* ---- table ----------------------------------------------------------------------------------------------------------- */

static void print_phases(const json_t *phases, const char *key, const char *title) {
    const json_t *ms = json_object_get(phases, key), *v;
    double sum = 0;
    const char *name;
    json_object_foreach((json_t *)ms, name, v) { sum += json_number_value(v); }
    printf("  %-8s %10.3f ms:", title, sum);
    json_object_foreach((json_t *)ms, name, v) {
        if (json_number_value(v) > 0) {
            printf(" %s %.1f%%", name, 100 * json_number_value(v) / sum);
        }
    }
    putchar('\n');
}

/* A number in `width` columns, or a dash where there is none. */
static void print_cell(const json_t *v, double factor, int width, int digits, const char *unit) {
    const int room = width - (int)strlen(unit);
    if (json_is_number(v)) {
        printf(" %*.*f%s", room, digits, factor * json_number_value(v), unit);
    } else {
        printf(" %*s", width, "-");
    }
}

/* Steps of several sequences, or of several rows of one, at a context, where some were asked for. */
static void print_steps(const json_t *point, const char *name, const char *what, const char *one) {
    const json_t *steps = json_object_get(point, name), *s;
    size_t i;
    if (json_array_size(steps) > 0) {
        printf("%s at context %d\n", name, (int)value(point, "context"));
    }
    json_array_foreach(steps, i, s) {
        printf("  %3d %s %10.3f ms a step, %8.1f tok/s, %5.3f of the first\n", (int)value(s, what),
               value(s, what) == 1 ? one : what, value(s, "step_ms"), value(s, "tok_s"), value(s, "of_first"));
    }
}

void ql_cli_bench_table(const json_t *result) {
    const json_t *points = json_object_get(result, "points"), *p;
    size_t i;
    printf("%9s %14s %12s %12s %12s %10s %16s\n", "context", "prefill tok/s", "first cold s", "first warm s",
           "decode tok/s", "load s", "share of stream");
    json_array_foreach(points, i, p) {
        printf("%9d", (int)value(p, "context"));
        print_cell(json_object_get(p, "prefill_tok_s"), 1, 14, 1, "");
        print_cell(json_object_get(p, "first_token_cold_s"), 1, 12, 3, "");
        print_cell(json_object_get(p, "first_token_warm_s"), 1, 12, 3, "");
        print_cell(json_object_get(p, "decode_tok_s"), 1, 12, 1, "");
        print_cell(json_object_get(p, "load_s"), 1, 10, 3, "");
        print_cell(json_object_get(p, "decode_share_of_stream"), 100, 16, 1, "%");
        putchar('\n');
    }
    json_array_foreach(points, i, p) {
        printf("phases at context %d\n", (int)value(p, "context"));
        print_phases(json_object_get(p, "phases"), "prefill_ms", "prefill");
        print_phases(json_object_get(p, "phases"), "decode_ms", "an id");
    }
    json_array_foreach(points, i, p) {
        print_steps(p, "together", "sequences", "sequence ");
        print_steps(p, "rows", "rows", "row ");
    }
}

/* ---- CSV ------------------------------------------------------------------------------------------------------------- */

/* One field; quoted where it has to be. */
static void put_field(FILE *f, const json_t *v, const char *end) {
    if (json_is_string(v)) {
        const char *s = json_string_value(v);
        bool quote = s[strcspn(s, ",\"\n")] != 0;
        fputs(quote ? "\"" : "", f);
        for (; *s; s++) {
            fputs(*s == '"' ? "\"" : "", f);
            fputc(*s, f);
        }
        fputs(quote ? "\"" : "", f);
    } else if (json_is_integer(v)) {
        fprintf(f, "%lld", (long long)json_integer_value(v));
    } else if (json_is_real(v)) {
        fprintf(f, "%.9g", json_real_value(v));
    }
    fputs(end, f);
}

/* One row a run, each with all that it takes to compare it: the point's medians, then the run, lane 0's device, then what
 * holds for the whole bench. */
static void write_csv(FILE *f, const json_t *result) {
    static const char *const of_point[] = {"context", "generated", "decode_bytes", "decode_share_of_stream"};
    static const char *const of_run[] = {"load_s",        "first_token_cold_s", "first_token_warm_s",
                                         "prefill_tok_s", "decode_tok_s",       "n_lanes",
                                         "device_kind"};
    static const char *const of_lane[] = {
        "name",        "bus",           "driver",        "cuda_driver",        "cuda_runtime",
        "nccl",        "link",          "sm_mhz",        "sm_max_mhz",         "memory_mhz",
        "power_w",     "power_limit_w", "temperature_c", "stream_bytes_per_s", "weight_bytes",
        "scale_bytes", "kv_bytes",      "state_bytes",   "workspace_bytes",    "context_bytes"};
    const json_t *prov = json_object_get(result, "provenance"), *points = json_object_get(result, "points"), *p, *r, *v;
    const char *name;
    size_t i, j, k;
    for (k = 0; k < sizeof of_point / sizeof *of_point; k++) {
        fprintf(f, "%s,", of_point[k]);
    }
    fputs("run,", f);
    for (k = 0; k < sizeof of_run / sizeof *of_run; k++) {
        fprintf(f, "%s,", of_run[k]);
    }
    for (k = 0; k < sizeof of_lane / sizeof *of_lane; k++) {
        fprintf(f, "lane0_%s,", of_lane[k]);
    }
    k = 0;
    json_object_foreach((json_t *)prov, name, v) { fprintf(f, "%s%s", k++ ? "," : "", name); }
    fputc('\n', f);
    json_array_foreach(points, i, p) {
        json_array_foreach(json_object_get(p, "runs"), j, r) {
            const json_t *lane = json_array_get(json_object_get(r, "lanes"), 0);
            for (k = 0; k < sizeof of_point / sizeof *of_point; k++) {
                put_field(f, json_object_get(p, of_point[k]), ",");
            }
            fprintf(f, "%zu,", j + 1);
            for (k = 0; k < sizeof of_run / sizeof *of_run; k++) {
                put_field(f, json_object_get(r, of_run[k]), ",");
            }
            for (k = 0; k < sizeof of_lane / sizeof *of_lane; k++) {
                put_field(f, json_object_get(lane, of_lane[k]), ",");
            }
            size_t n = json_object_size(prov);
            json_object_foreach((json_t *)prov, name, v) { put_field(f, v, --n ? "," : "\n"); }
        }
    }
}

/* ---- SVG ------------------------------------------------------------------------------------------------------------- */

enum { WIDTH = 420, HEIGHT = 260, LEFT = 64, TOP = 44, GAP = 96 };

static double largest(const json_t *points, const char *key) {
    double most = 0;
    size_t i;
    const json_t *p;
    json_array_foreach(points, i, p) { most = fmax(most, value(p, key)); }
    return most;
}

/* A round number at or above v that four steps divide well. */
static double nice_top(double v) {
    double unit = pow(10, floor(log10(v > 0 ? v : 1)));
    static const double steps[] = {1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (steps[i] * unit >= v) {
            return steps[i] * unit;
        }
    }
    return 10 * unit;
}

/* One panel, context in powers of two to the right, tokens a second up from zero. */
static void draw_panel(FILE *f, const json_t *points, const char *key, const char *title, double x0) {
    size_t n = json_array_size(points), i;
    double lo = log2(value(json_array_get(points, 0), "context")), hi = lo, top = nice_top(largest(points, key));
    const json_t *p;
    json_array_foreach(points, i, p) {
        lo = fmin(lo, log2(value(p, "context")));
        hi = fmax(hi, log2(value(p, "context")));
    }
    hi = hi > lo ? hi : lo + 1;
    fprintf(f, "<text x=\"%.0f\" y=\"%d\" font-weight=\"bold\">%s</text>\n", x0, TOP - 12, title);
    for (int k = 0; k <= 4; k++) {
        double y = TOP + HEIGHT - HEIGHT * k / 4.0;
        fprintf(
            f, "<path d=\"M%.1f %.1fh%d\" stroke=\"#ddd\"/><text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
            x0, y, WIDTH, x0 - 6, y + 4, top * k / 4);
    }
    fputs("<polyline fill=\"none\" stroke=\"#1f6feb\" stroke-width=\"2\" points=\"", f);
    json_array_foreach(points, i, p) {
        fprintf(f, "%.1f,%.1f ", x0 + WIDTH * (log2(value(p, "context")) - lo) / (hi - lo),
                TOP + HEIGHT - HEIGHT * value(p, key) / top);
    }
    fputs("\"/>\n", f);
    json_array_foreach(points, i, p) {
        double x = x0 + WIDTH * (log2(value(p, "context")) - lo) / (hi - lo),
               y = TOP + HEIGHT - HEIGHT * value(p, key) / top;
        fprintf(f,
                "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"#1f6feb\"/><text x=\"%.1f\" y=\"%.1f\" "
                "text-anchor=\"%s\">%.4g"
                "</text><text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n",
                x, y, x, y - 8,
                i == 0       ? "start"
                : i + 1 == n ? "end"
                             : "middle",
                value(p, key), x, TOP + HEIGHT + 18, (int)value(p, "context"));
    }
    fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">context</text>\n", x0 + WIDTH / 2.0,
            TOP + HEIGHT + 38);
}

static void write_svg(FILE *f, const json_t *result) {
    const json_t *points = json_object_get(result, "points"), *prov = json_object_get(result, "provenance");
    const json_t *run = json_array_get(json_object_get(json_array_get(points, 0), "runs"), 0);
    const char *device = json_string_value(json_object_get(json_array_get(json_object_get(run, "lanes"), 0), "name"));
    int lanes = (int)value(run, "n_lanes");
    size_t least = SIZE_MAX, most = 0, i;
    const json_t *p;
    json_array_foreach(points, i, p) {
        const size_t n = json_array_size(json_object_get(p, "runs"));
        least = n < least ? n : least;
        most = n > most ? n : most;
    }
    char runs[64];
    snprintf(runs, sizeof runs, least == most ? "median of %zu" : "median of %zu to %zu", least, most);
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            LEFT + 2 * WIDTH + GAP + 40, TOP + HEIGHT + 76);
    draw_panel(f, points, "prefill_tok_s", "prefill, tokens a second", LEFT);
    draw_panel(f, points, "decode_tok_s", "decode, tokens a second", LEFT + WIDTH + GAP);
    fprintf(f, "<text x=\"%d\" y=\"%d\" fill=\"#555\">%d lane%s on %s, %s, KV %s, %s, qlane ", LEFT, TOP + HEIGHT + 62,
            lanes, lanes == 1 ? "" : "s", device ? device : "this machine",
            json_string_value(json_object_get(prov, "scheme")), json_string_value(json_object_get(prov, "kv")), runs);
    for (const char *s = json_string_value(json_object_get(prov, "version")); *s && *s != ','; s++) {
        fputc(*s, f);
    }
    fputs(")</text>\n</svg>\n", f);
}

/* ---- files ------------------------------------------------------------------------------------------------------------- */

static void write_json(FILE *f, const json_t *result) {
    json_dumpf(result, f, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    fputc('\n', f);
}

int ql_cli_bench_write(const json_t *result, const char *dir) {
    static const struct {
        const char *name;
        void (*write)(FILE *f, const json_t *result);
    } files[] = {{"bench.json", write_json}, {"bench.csv", write_csv}, {"bench.svg", write_svg}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[QL_CLI_FOLDER_BYTES + 16];
        snprintf(path, sizeof path, "%s/%s", dir, files[i].name);
        FILE *f = fopen(path, "w");
        if (!f) {
            return ql_cli_fail(QL_EXIT_MODEL, "cannot write %s: %s", path, strerror(errno));
        }
        files[i].write(f, result);
        bool bad = ferror(f) != 0;
        if (fclose(f) != 0 || bad) {
            return ql_cli_fail(QL_EXIT_MODEL, "cannot write %s: %s", path, strerror(errno));
        }
    }
    return 0;
}
