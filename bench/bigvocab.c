/* Writes a tokenizer.json of the size that large models have, for timing: everything but the vocabulary is another
 * file's, merges build every prefix of the words of a text and then of made-up words.
 *
 *   build/bigvocab TOKENIZER_JSON TEXT_FILE ENTRIES OUT
 */
#include <ctype.h>
#include <jansson.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WORD = 24 };

static json_t *vocab, *merges;
static size_t wanted;

static int is_full(void) { return json_object_size(vocab) >= wanted; }

static void add(const char *token) {
    json_object_set_new(vocab, token, json_integer((json_int_t)json_object_size(vocab)));
}

/* Merges that build a word from its first character on; `space`: one stands before it. */
static void add_word(const char *word, int space) {
    char left[MAX_WORD + 8] = "", right[2] = "", whole[MAX_WORD + 8];
    if (space) {
        strcpy(left, "\xc4\xa0"); /* U+0120, the byte alphabet's space */
    } else {
        left[0] = *word++;
    }
    for (; *word && !is_full(); word++) {
        right[0] = *word;
        snprintf(whole, sizeof whole, "%s%s", left, right);
        if (!json_object_get(vocab, whole)) {
            add(whole);
            json_array_append_new(merges, json_pack("[s,s]", left, right));
        }
        strcpy(left, whole);
    }
}

static void add_words_of(FILE *text) {
    char word[MAX_WORD + 1];
    size_t n = 0;
    int before = ' ', c, space = 0;
    do {
        c = fgetc(text);
        if (c != EOF && isalpha(c) && c < 128 && n < MAX_WORD) {
            space = n ? space : before == ' ';
            word[n++] = (char)c;
        } else if (n > 0) {
            word[n] = 0;
            add_word(word, space);
            n = 0;
        }
        before = c;
    } while (c != EOF && !is_full());
}

static void add_made_up_words(void) {
    uint64_t state = 1;
    while (!is_full()) {
        char word[16];
        int n = 0;
        do {
            state = state * 6364136223846793005u + 1442695040888963407u;
            word[n++] = (char)('a' + (state >> 33) % 26);
        } while (n < 3 || (n < 12 && (state >> 40) % 4));
        word[n] = 0;
        add_word(word, (state >> 50) & 1);
    }
}

int main(int argc, char **argv) {
    if (argc != 5 || (wanted = strtoul(argv[3], NULL, 10)) < 1000) {
        fprintf(stderr, "usage: bigvocab TOKENIZER_JSON TEXT_FILE ENTRIES OUT\n");
        return 2;
    }
    json_error_t e;
    json_t *root = json_load_file(argv[1], 0, &e), *model = json_object_get(root, "model");
    FILE *text = fopen(argv[2], "rb");
    if (!model || !text) {
        fprintf(stderr, "bigvocab: cannot read %s\n", model ? argv[2] : argv[1]);
        return 3;
    }
    vocab = json_object();
    merges = json_array();
    const char *key;
    json_t *id;
    json_object_foreach(json_object_get(model, "vocab"), key, id) { /* the 256 byte symbols, of one character each */
        size_t n = strlen(key);
        if (n == 1 || (n == 2 && (key[0] & 0xe0) == 0xc0)) {
            add(key);
        }
    }
    add_words_of(text);
    add_made_up_words();
    size_t i;
    json_t *token;
    json_array_foreach(json_object_get(root, "added_tokens"), i, token) {
        json_object_set_new(token, "id", json_integer((json_int_t)(wanted + i)));
    }
    json_object_set_new(model, "vocab", vocab);
    json_object_set_new(model, "merges", merges);
    int failed = json_dump_file(root, argv[4], JSON_INDENT(1));
    json_decref(root);
    fclose(text);
    if (failed) {
        fprintf(stderr, "bigvocab: cannot write %s\n", argv[4]);
        return 3;
    }
    return 0;
}
