/* Long text from the trained model. Faults that short prompts hide (a decaying state, a wrong rotary range, scales that
 * are slightly off) end in repetition or nonsense after a while, so: two hundred generated tokens must stay varied and
 * true to what the model was trained on, and things said long before must be recalled.
 */
#include "tests/model/sense.h"

static ql_options tiny(int32_t lanes, int32_t chunk) {
    ql_options o = ql_test_options(ql_test_model_named("tiny"), lanes);
    o.ctx = 2048;
    o.chunk = chunk;
    o.kv = QL_KV_F16;
    o.prompt_precision = o.gen_precision = QL_PREC_AUTO;
    return o;
}

static void two_hundred_tokens(void **state) {
    (void)state;
    const ql_options o = tiny(2, 512);
    ql_test_two_hundred(&o);
}

static void recall(void **state) {
    (void)state;
    for (int32_t chunk = 64; chunk <= 512; chunk *= 8) { /* through several chunks of prompt, and in one */
        const ql_options o = tiny(chunk == 64 ? 4 : 1, chunk);
        ql_test_recall(&o);
    }
}

static void chat_turns(void **state) {
    (void)state;
    const ql_options o = tiny(2, 64);
    ql_test_chat_turns(&o);
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_hundred_tokens),
        cmocka_unit_test(recall),
        cmocka_unit_test(chat_turns),
    };
    return cmocka_run_group_tests_name("coherence", tests, NULL, NULL);
}
