/* What a plan counts beside what lanes ask for: a GPU's context, and NCCL where it has to serve. The GPUs are made up: sizes come from
 * shapes, and whether NCCL serves is a field. */
#include "runtime/engine/engine_impl.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static ql_checkpoint *open_model(void) {
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    if (ql_checkpoint_open(&c, "models/tiny", &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    return c;
}

static ql_devices devices_of(ql_device_kind kind, int32_t n_lane, bool nccl) {
    return (ql_devices){.kind = kind, .n_lane = n_lane, .ops = ql_host_ops(), .nccl = nccl};
}

static ql_options options_of(const ql_devices *d) {
    ql_options o = ql_options_default();
    o.device = d->kind;
    o.lanes = d->n_lane;
    return o;
}

static void test_nccl_is_part_of_a_lane_where_it_serves(void **state) {
    (void)state;
    ql_checkpoint *c = open_model();
    for (int32_t n_lane = 1; n_lane <= 4; n_lane *= 2) {
        for (int32_t kind = QL_DEVICE_HOST; kind <= QL_DEVICE_CUDA; kind++) {
            ql_devices with = devices_of((ql_device_kind)kind, n_lane, true),
                       without = devices_of((ql_device_kind)kind, n_lane, false);
            ql_options o = options_of(&with);
            uint64_t nccl = ql_devices_nccl_bytes(&with);
            if (kind == QL_DEVICE_CUDA && n_lane > 1) { /* what was measured, and nothing of another order */
                assert_in_range(nccl, 850000000, 950000000);
            } else {
                assert_int_equal(nccl, 0);
            }
            assert_int_equal(ql_devices_nccl_bytes(&without), 0);
            assert_int_equal(ql_devices_context_bytes(&with) - ql_devices_context_bytes(&without), nccl);
            assert_int_equal(ql_plan_largest_lane(c, &o, &with, 512) - ql_plan_largest_lane(c, &o, &without, 512),
                             nccl);
        }
    }
    ql_checkpoint_close(&c);
}

/* A limit that holds 1,024 tokens and NCCL holds more without it, and no more when NCCL has its part. */
static void test_less_context_fits_beside_nccl(void **state) {
    (void)state;
    ql_checkpoint *c = open_model();
    ql_devices with = devices_of(QL_DEVICE_CUDA, 2, true), without = devices_of(QL_DEVICE_CUDA, 2, false);
    ql_options o = options_of(&with);
    uint64_t limit = ql_plan_largest_lane(c, &o, &with, 1024);
    assert_int_equal(ql_plan_max_ctx(c, &o, &with, limit), 1024);
    assert_int_equal(ql_plan_max_ctx(c, &o, &with, limit - 1), 1024 - QL_PAGE);
    assert_int_equal(ql_plan_max_ctx(c, &o, &without, limit), c->config.max_ctx);
    ql_checkpoint_close(&c);
}

/* On whatever machine this is: with GPUs that reach each other's memory, with others, or with none. */
static void test_plan_adds_up(void **state) {
    (void)state;
    ql_checkpoint *c = open_model();
    for (int32_t kind = QL_DEVICE_HOST; kind <= QL_DEVICE_CUDA; kind++) {
        ql_devices d = devices_of((ql_device_kind)kind, 2, true), one = devices_of((ql_device_kind)kind, 1, true);
        ql_options o = options_of(&d);
        ql_error err = {0};
        static ql_plan plan;
        plan.size = sizeof plan;
        ql_status status = ql_checkpoint_plan(c, &o, &plan, &err);
        if (kind == QL_DEVICE_CUDA && !QL_CUDA) {
            assert_int_equal(status, QL_ERR_DEVICE);
            assert_string_equal(err.text, "this build has no CUDA lanes; accepted is the host device");
            continue;
        }
        assert_int_equal(status, QL_OK);
        for (int32_t i = 0; i < 2; i++) {
            const ql_lane_plan *l = &plan.lane[i];
            assert_true(l->nccl_bytes == 0 || l->nccl_bytes == ql_devices_nccl_bytes(&d));
            assert_int_equal(l->context_bytes, ql_devices_context_bytes(&one) + l->nccl_bytes);
            assert_int_equal(l->total_bytes, l->weight_bytes + l->scale_bytes + l->kv_bytes + l->state_bytes +
                                                 l->workspace_bytes + l->context_bytes);
        }
    }
    ql_checkpoint_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nccl_is_part_of_a_lane_where_it_serves),
        cmocka_unit_test(test_less_context_fits_beside_nccl),
        cmocka_unit_test(test_plan_adds_up),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
