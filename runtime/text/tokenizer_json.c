/* tokenizer.json, as the `tokenizers` package writes it, for byte-level BPE.
 *
 * The file says how text becomes ids. Whatever this runtime would not do exactly as the file says is refused by name;
 * so is a setting that it does not know, since it may change ids. */
#include "runtime/base/json.h"
#include "runtime/text/text.h"
#include "runtime/text/tokenizer_impl.h"
#include "runtime/text/utf8.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- typed access: `where` names the object in messages ------------------------------------------------------------ */

/* Refuses keys that are not in `known`, a list that ends with NULL. */
static ql_status check_keys(const json_t *obj, const char *where, const char *const *known, ql_error *err) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)obj, key, value) {
        size_t i = 0;
        while (known[i] && strcmp(known[i], key) != 0) {
            i++;
        }
        if (!known[i]) {
            return ql_fail(err, QL_ERR_MODEL, "%s has a setting \"%.60s\" that is not supported", where, key);
        }
    }
    return QL_OK;
}

static ql_status require_false(const json_t *obj, const char *where, const char *key, ql_error *err) {
    bool value = false;
    QL_TRY(ql_json_bool(obj, where, key, &value, err));
    return value ? ql_fail(err, QL_ERR_MODEL, "%s has %s true; only false is supported", where, key) : QL_OK;
}

static ql_status require_null(const json_t *obj, const char *where, const char *key, ql_error *err) {
    const json_t *value = json_object_get(obj, key);
    return value && !json_is_null(value)
               ? ql_fail(err, QL_ERR_MODEL, "%s has %s set; only null is supported", where, key)
               : QL_OK;
}

/* Finds which of the `accepted` types, a list that ends with NULL, an object says it has. */
static ql_status find_type(const json_t *obj, const char *where, const char *const *accepted, int *found,
                           ql_error *err) {
    if (!json_is_object(obj)) {
        return ql_fail(err, QL_ERR_MODEL, "%s is missing or not an object", where);
    }
    const char *type = "";
    QL_TRY(ql_json_str(obj, where, "type", &type, err));
    for (*found = 0; accepted[*found]; ++*found) {
        if (strcmp(accepted[*found], type) == 0) {
            return QL_OK;
        }
    }
    return ql_fail(err, QL_ERR_MODEL, "%s has type \"%.60s\"; accepted: %s%s%s", where, type, accepted[0],
                   accepted[1] ? ", " : "", accepted[1] ? accepted[1] : "");
}

static ql_status require_type(const json_t *obj, const char *where, const char *type, ql_error *err) {
    const char *const accepted[] = {type, NULL};
    int found;
    return find_type(obj, where, accepted, &found, err);
}

/* ---- pipeline ---------------------------------------------------------------------------------------------------- */

static ql_status load_normalizer(ql_tokenizer *t, const json_t *normalizer, ql_error *err) {
    if (!normalizer || json_is_null(normalizer)) {
        return QL_OK;
    }
    QL_TRY(require_type(normalizer, "normalizer", "NFC", err));
    t->nfc = true;
    return QL_OK;
}

static ql_status check_byte_level(const json_t *step, ql_error *err) {
    static const char where[] = "pre_tokenizer ByteLevel";
    static const char *const known[] = {"type", "add_prefix_space", "trim_offsets", "use_regex", NULL};
    QL_TRY(require_type(step, where, "ByteLevel", err));
    QL_TRY(check_keys(step, where, known, err));
    /* Both are true when the file does not say. */
    for (int i = 0; i < 2; i++) {
        const char *key = i ? "use_regex" : "add_prefix_space";
        bool value = true;
        QL_TRY(ql_json_bool(step, where, key, &value, err));
        if (value) {
            return ql_fail(err, QL_ERR_MODEL, "%s has %s true; only false is supported", where, key);
        }
    }
    return QL_OK;
}

static ql_status load_split(ql_tokenizer *t, const json_t *split, ql_error *err) {
    static const char where[] = "pre_tokenizer Split";
    static const char *const known[] = {"type", "pattern", "behavior", "invert", NULL};
    QL_TRY(require_type(split, where, "Split", err));
    QL_TRY(check_keys(split, where, known, err));
    QL_TRY(require_false(split, where, "invert", err));
    const char *behavior = "", *regex = NULL;
    QL_TRY(ql_json_str(split, where, "behavior", &behavior, err));
    if (strcmp(behavior, "Isolated") != 0) {
        return ql_fail(err, QL_ERR_MODEL, "%s has behavior \"%.60s\"; accepted: Isolated", where, behavior);
    }
    const json_t *pattern = json_object_get(split, "pattern");
    if (json_is_object(pattern) && json_object_size(pattern) == 1) {
        QL_TRY(ql_json_str(pattern, where, "Regex", &regex, err));
    }
    if (!regex) {
        return ql_fail(err, QL_ERR_MODEL, "%s has no pattern of the kind Regex; no other is supported", where);
    }
    return ql_pattern_compile(&t->pattern, regex, err);
}

static ql_status load_pre_tokenizer(ql_tokenizer *t, const json_t *pre, ql_error *err) {
    static const char *const accepted[] = {"ByteLevel", "Sequence", NULL};
    static const char *const known[] = {"type", "pretokenizers", NULL};
    int type;
    QL_TRY(find_type(pre, "pre_tokenizer", accepted, &type, err));
    if (type == 0) {
        return check_byte_level(pre, err);
    }
    QL_TRY(check_keys(pre, "pre_tokenizer", known, err));
    const json_t *steps = json_object_get(pre, "pretokenizers");
    if (json_array_size(steps) != 2) {
        return ql_fail(err, QL_ERR_MODEL, "pre_tokenizer Sequence has %zu steps; accepted are two, Split and ByteLevel",
                       json_array_size(steps));
    }
    QL_TRY(load_split(t, json_array_get(steps, 0), err));
    return check_byte_level(json_array_get(steps, 1), err);
}

/* As post-processor ByteLevel touches offsets only. A template is accepted when it adds nothing to a single text. */
static ql_status check_post_processor(const json_t *post, ql_error *err) {
    static const char *const accepted[] = {"ByteLevel", "TemplateProcessing", NULL};
    if (!post || json_is_null(post)) {
        return QL_OK;
    }
    int type;
    QL_TRY(find_type(post, "post_processor", accepted, &type, err));
    const json_t *single = json_object_get(post, "single");
    const char *id = json_string_value(json_object_get(json_object_get(json_array_get(single, 0), "Sequence"), "id"));
    if (type == 1 && (json_array_size(single) != 1 || !id || strcmp(id, "A") != 0)) {
        return ql_fail(err, QL_ERR_MODEL, "post_processor adds tokens to a text; only one that does not is supported");
    }
    return QL_OK;
}

/* ---- byte alphabet ----------------------------------------------------------------------------------------------- */

/* The vocabulary is written in characters that stand for bytes: printable Latin-1 for itself, U+0100 upwards for the
 * 68 other bytes in order. */
enum { ALPHABET_END = 0x144 };

typedef struct alphabet {
    int16_t byte_of[ALPHABET_END]; /* -1 where a code point stands for none */
} alphabet;

static void make_alphabet(alphabet *a) {
    int next = 0x100;
    memset(a->byte_of, 0xFF, sizeof a->byte_of);
    for (int b = 0; b < 256; b++) {
        bool itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        a->byte_of[itself ? b : next++] = (int16_t)b;
    }
}

/* Writes the bytes that text[0..n) stands for. Returns false when it has a character outside the alphabet. */
static bool alphabet_bytes(const alphabet *a, const char *text, size_t n, char *out, size_t *len) {
    size_t k = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp = 0;
        i += (size_t)ql_utf8_step((const unsigned char *)text + i, n - i, &cp);
        if (cp >= ALPHABET_END || a->byte_of[cp] < 0) {
            return false;
        }
        out[k++] = (char)a->byte_of[cp];
    }
    *len = k;
    return true;
}

/* ---- model ------------------------------------------------------------------------------------------------------- */

static ql_status check_model(const json_t *model, ql_error *err) {
    static const char *const known[] = {"type",
                                        "dropout",
                                        "unk_token",
                                        "continuing_subword_prefix",
                                        "end_of_word_suffix",
                                        "fuse_unk",
                                        "byte_fallback",
                                        "ignore_merges",
                                        "vocab",
                                        "merges",
                                        NULL};
    QL_TRY(require_type(model, "model", "BPE", err));
    QL_TRY(check_keys(model, "model", known, err));
    QL_TRY(require_null(model, "model", "dropout", err));
    QL_TRY(require_null(model, "model", "unk_token", err));
    QL_TRY(require_false(model, "model", "fuse_unk", err));
    QL_TRY(require_false(model, "model", "byte_fallback", err));
    for (int i = 0; i < 2; i++) {
        const char *key = i ? "end_of_word_suffix" : "continuing_subword_prefix", *value = "";
        QL_TRY(ql_json_str(model, "model", key, &value, err));
        if (*value) {
            return ql_fail(err, QL_ERR_MODEL, "model has %s \"%.60s\"; accepted are null and \"\"", key, value);
        }
    }
    if (!json_is_object(json_object_get(model, "vocab")) || !json_is_array(json_object_get(model, "merges"))) {
        return ql_fail(err, QL_ERR_MODEL, "model needs an object \"vocab\" and an array \"merges\"");
    }
    return QL_OK;
}

/* `scratch` here and below: room for the bytes of two tokens. */
static ql_status load_vocab(ql_bpe *bpe, json_t *vocab, const alphabet *a, char *scratch, ql_error *err) {
    const char *key;
    json_t *value;
    json_object_foreach(vocab, key, value) {
        size_t n = strlen(key), len = 0;
        if (!json_is_integer(value)) {
            return ql_fail(err, QL_ERR_MODEL, "model.vocab: the id of \"%.60s\" is not an integer", key);
        }
        if (n > QL_BPE_MAX_TOKEN) {
            return ql_fail(err, QL_ERR_MODEL, "model.vocab: token %lld has %zu bytes; at most %d are accepted",
                           (long long)json_integer_value(value), n, QL_BPE_MAX_TOKEN);
        }
        if (!alphabet_bytes(a, key, n, scratch, &len)) {
            return ql_fail(err, QL_ERR_MODEL, "model.vocab: \"%.60s\" has a character outside the byte-level alphabet",
                           key);
        }
        QL_TRY(ql_bpe_add(bpe, json_integer_value(value), scratch, len, err));
    }
    return QL_OK;
}

/* The two parts of a merge: an array of two strings, or one string with a space between. */
static bool merge_parts(const json_t *merge, const char *part[2], size_t n[2]) {
    const char *text = json_string_value(merge);
    if (text) {
        const char *space = strchr(text, ' ');
        if (!space || strchr(space + 1, ' ')) {
            return false;
        }
        part[0] = text;
        n[0] = (size_t)(space - text);
        part[1] = space + 1;
        n[1] = strlen(space + 1);
        return true;
    }
    if (json_array_size(merge) != 2) {
        return false;
    }
    for (size_t k = 0; k < 2; k++) {
        part[k] = json_string_value(json_array_get(merge, k));
        n[k] = part[k] ? strlen(part[k]) : 0;
    }
    return part[0] && part[1];
}

static ql_status load_merges(ql_bpe *bpe, const json_t *merges, const alphabet *a, char *scratch, ql_error *err) {
    size_t i;
    json_t *merge;
    json_array_foreach(merges, i, merge) {
        const char *part[2];
        size_t n[2], left_len, right_len;
        if (!merge_parts(merge, part, n)) {
            return ql_fail(err, QL_ERR_MODEL,
                           "model.merges: entry %zu is neither two strings nor one with a single space", i);
        }
        int32_t left = -1, right = -1, merged = -1;
        if (n[0] <= QL_BPE_MAX_TOKEN && n[1] <= QL_BPE_MAX_TOKEN &&
            alphabet_bytes(a, part[0], n[0], scratch, &left_len) &&
            alphabet_bytes(a, part[1], n[1], scratch + left_len, &right_len)) {
            left = ql_bpe_find(bpe, scratch, left_len);
            right = ql_bpe_find(bpe, scratch + left_len, right_len);
            merged = ql_bpe_find(bpe, scratch, left_len + right_len);
        }
        if (left < 0 || right < 0 || merged < 0) {
            return ql_fail(err, QL_ERR_MODEL, "model.merges: entry %zu, \"%.*s\" and \"%.*s\": %s not in model.vocab",
                           i, (int)(n[0] < 60 ? n[0] : 60), part[0], (int)(n[1] < 60 ? n[1] : 60), part[1],
                           left < 0    ? "the first is"
                           : right < 0 ? "the second is"
                                       : "their result is");
        }
        ql_bpe_merge(bpe, left, right, (uint32_t)i, merged);
    }
    return QL_OK;
}

static ql_status load_model(ql_tokenizer *t, const json_t *model, ql_error *err) {
    QL_TRY(check_model(model, err));
    const json_t *merges = json_object_get(model, "merges");
    alphabet a;
    make_alphabet(&a);
    void *scratch;
    QL_TRY(ql_alloc(NULL, 2 * QL_BPE_MAX_TOKEN, 1, "reading the vocabulary", &scratch, err));
    ql_status status;
    QL_TRY_GOTO(load_vocab(&t->bpe, json_object_get(model, "vocab"), &a, scratch, err), done);
    QL_TRY_GOTO(ql_bpe_index(&t->bpe, json_array_size(merges), err), done);
    QL_TRY_GOTO(load_merges(&t->bpe, merges, &a, scratch, err), done);
done:
    free(scratch);
    return status;
}

/* ---- added tokens ------------------------------------------------------------------------------------------------ */

/* Whether the byte-level spelling of a text is the text itself. */
static bool is_plain_ascii(const char *text) {
    while (*text > 32 && *text < 127) {
        text++;
    }
    return !*text;
}

static ql_status load_added_token(ql_tokenizer *t, int64_t id, const json_t *token, ql_error *err) {
    static const char where[] = "an added token";
    static const char *const flags[] = {"single_word", "lstrip", "rstrip", "normalized"};
    static const char *const known[] = {"id",     "content",    "single_word", "lstrip",
                                        "rstrip", "normalized", "special",     NULL};
    QL_TRY(check_keys(token, where, known, err));
    const char *content = NULL;
    QL_TRY(ql_json_str(token, where, "content", &content, err));
    if (!content) {
        return ql_fail(err, QL_ERR_MODEL, "added token %lld has no content", (long long)id);
    }
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        bool value = false;
        QL_TRY(ql_json_bool(token, where, flags[i], &value, err));
        if (value) {
            return ql_fail(err, QL_ERR_MODEL, "added token %lld \"%.60s\" has %s true; only false is supported",
                           (long long)id, content, flags[i]);
        }
    }
    bool special = false;
    QL_TRY(ql_json_bool(token, where, "special", &special, err));
    size_t n = strlen(content);
    int32_t in_vocab = is_plain_ascii(content) ? ql_bpe_find(&t->bpe, content, n) : -1;
    if (in_vocab >= 0 && in_vocab != id) {
        return ql_fail(err, QL_ERR_MODEL, "added token %lld \"%.60s\" has the id %d in model.vocab", (long long)id,
                       content, (int)in_vocab);
    }
    if (in_vocab < 0) {
        QL_TRY(ql_bpe_add(&t->bpe, id, content, n, err));
    }
    return ql_added_add(&t->added, (int32_t)id, special, err);
}

static ql_status load_added(ql_tokenizer *t, const json_t *tokens, ql_error *err) {
    if (tokens && !json_is_array(tokens)) {
        return ql_fail(err, QL_ERR_MODEL, "added_tokens is not an array");
    }
    size_t i;
    json_t *token;
    json_array_foreach(tokens, i, token) {
        int64_t id = -1;
        if (!json_is_object(token)) {
            return ql_fail(err, QL_ERR_MODEL, "added_tokens: entry %zu is not an object", i);
        }
        QL_TRY(ql_json_int(token, "an added token", "id", 0, QL_BPE_MAX_ID, &id, err));
        QL_TRY(load_added_token(t, id, token, err));
    }
    return QL_OK;
}

/* tokenizer_config.json may list tokens that tokenizer.json lacks; where both know an id the latter is right. */
static ql_status load_config_added(ql_tokenizer *t, const json_t *tokens, ql_error *err) {
    if (!tokens || json_is_null(tokens)) {
        return QL_OK;
    }
    if (!json_is_object(tokens)) {
        return ql_fail(err, QL_ERR_MODEL, "added_tokens_decoder is not an object");
    }
    const char *key;
    json_t *token;
    json_object_foreach((json_t *)tokens, key, token) {
        char *end;
        errno = 0;
        long long id = strtoll(key, &end, 10);
        if (errno || end == key || *end || id < 0 || id > QL_BPE_MAX_ID || !json_is_object(token)) {
            return ql_fail(err, QL_ERR_MODEL,
                           "added_tokens_decoder: \"%.60s\" is not an id from 0 to %d with an object", key,
                           QL_BPE_MAX_ID);
        }
        if (!ql_tokenizer_has(t, (int32_t)id)) {
            QL_TRY(load_added_token(t, id, token, err));
        }
    }
    return QL_OK;
}

/* ---- the whole file ---------------------------------------------------------------------------------------------- */

static ql_status load(ql_tokenizer *t, const json_t *root, const json_t *config, ql_error *err) {
    static const char *const known[] = {"version", "truncation", "padding",       "added_tokens",   "normalizer",
                                        "model",   "decoder",    "pre_tokenizer", "post_processor", NULL};
    const char *version = "";
    QL_TRY(check_keys(root, "the file", known, err));
    QL_TRY(ql_json_str(root, "the file", "version", &version, err));
    if (strcmp(version, "1.0") != 0) {
        return ql_fail(err, QL_ERR_MODEL, "version is \"%.60s\"; accepted: 1.0", version);
    }
    QL_TRY(require_null(root, "the file", "truncation", err));
    QL_TRY(require_null(root, "the file", "padding", err));
    QL_TRY(load_normalizer(t, json_object_get(root, "normalizer"), err));
    QL_TRY(load_pre_tokenizer(t, json_object_get(root, "pre_tokenizer"), err));
    const json_t *model = json_object_get(root, "model");
    QL_TRY(load_model(t, model, err));
    QL_TRY(check_post_processor(json_object_get(root, "post_processor"), err));
    QL_TRY(require_type(json_object_get(root, "decoder"), "decoder", "ByteLevel", err));
    QL_TRY(load_added(t, json_object_get(root, "added_tokens"), err));
    QL_TRY(load_config_added(t, json_object_get(config, "added_tokens_decoder"), err));
    QL_TRY(ql_added_sort(&t->added, &t->bpe, err));
    bool ignore_merges = false;
    QL_TRY(ql_json_bool(model, "model", "ignore_merges", &ignore_merges, err));
    QL_TRY(ql_bpe_finish(&t->bpe, ignore_merges, err));
    void *special;
    QL_TRY(ql_alloc(NULL, (size_t)t->bpe.n_token, 1, "the vocabulary", &special, err));
    t->special = special;
    for (size_t i = 0; i < t->added.n; i++) {
        t->special[t->added.token[i].id] = t->added.token[i].special;
    }
    return QL_OK;
}

ql_status ql_tokenizer_parse(ql_tokenizer **tokenizer, const char *json, size_t n, const char *config_json,
                             size_t config_n, const char *what, ql_error *err) {
    json_t *root = NULL, *config = NULL;
    ql_tokenizer *t = NULL;
    void *block;
    ql_status status;
    QL_TRY_GOTO(ql_alloc(NULL, 1, sizeof *t, "a tokenizer", &block, err), done);
    t = block;
    QL_TRY_GOTO(ql_json_parse(json, n, what, &root, err), done);
    if (config_json) {
        QL_TRY_GOTO(ql_json_parse(config_json, config_n, "tokenizer_config.json", &config, err), done);
    }
    status = load(t, root, config, err);
    if (status == QL_OK) {
        *tokenizer = t;
        t = NULL;
    } else if (err) {
        status = ql_fail_in(err, what);
    }
done:
    ql_tokenizer_close(&t);
    json_decref(root);
    json_decref(config);
    return status;
}
