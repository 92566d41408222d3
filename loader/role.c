#include "loader/role.h"

#include "loader/checkpoint.h"

#define GLOBAL(member) offsetof(ql_checkpoint, member)
#define LAYER(member) offsetof(ql_layer, member)

static const ql_role_info roles[QL_ROLE_COUNT] = {
    [QL_ROLE_EMBED] = {"embed_tokens.weight", QL_PLACE_GLOBAL, false, QL_PART_VOCAB, "embedding", GLOBAL(embed)},
    [QL_ROLE_NORM] = {"norm.weight", QL_PLACE_GLOBAL, false, QL_PART_WHOLE, "norm", GLOBAL(norm)},
    [QL_ROLE_LM_HEAD] = {"lm_head", QL_PLACE_GLOBAL, true, QL_PART_VOCAB, "weight", GLOBAL(lm_head)},

    [QL_ROLE_INPUT_NORM] = {"input_layernorm.weight", QL_PLACE_LAYER, false, QL_PART_WHOLE, "norm", LAYER(input_norm)},
    [QL_ROLE_POST_NORM] = {"post_attention_layernorm.weight", QL_PLACE_LAYER, false, QL_PART_WHOLE, "norm",
                           LAYER(post_norm)},
    [QL_ROLE_GATE] = {"mlp.gate_proj", QL_PLACE_LAYER, true, QL_PART_MLP, "weight", LAYER(gate)},
    [QL_ROLE_UP] = {"mlp.up_proj", QL_PLACE_LAYER, true, QL_PART_MLP, "weight", LAYER(up)},
    [QL_ROLE_DOWN] = {"mlp.down_proj", QL_PLACE_LAYER, true, QL_PART_DOWN, "weight", LAYER(down)},

    [QL_ROLE_Q] = {"self_attn.q_proj", QL_PLACE_FULL, true, QL_PART_Q, "weight", LAYER(q)},
    [QL_ROLE_K] = {"self_attn.k_proj", QL_PLACE_FULL, true, QL_PART_KV, "weight", LAYER(k)},
    [QL_ROLE_V] = {"self_attn.v_proj", QL_PLACE_FULL, true, QL_PART_KV, "weight", LAYER(v)},
    [QL_ROLE_O] = {"self_attn.o_proj", QL_PLACE_FULL, true, QL_PART_O, "weight", LAYER(o)},
    [QL_ROLE_Q_NORM] = {"self_attn.q_norm.weight", QL_PLACE_FULL, false, QL_PART_WHOLE, "norm", LAYER(q_norm)},
    [QL_ROLE_K_NORM] = {"self_attn.k_norm.weight", QL_PLACE_FULL, false, QL_PART_WHOLE, "norm", LAYER(k_norm)},

    [QL_ROLE_IN_QKV] = {"linear_attn.in_proj_qkv", QL_PLACE_GDN, true, QL_PART_IN_QKV, "weight", LAYER(in_qkv)},
    [QL_ROLE_IN_Z] = {"linear_attn.in_proj_z", QL_PLACE_GDN, true, QL_PART_VALUE, "weight", LAYER(in_z)},
    [QL_ROLE_IN_B] = {"linear_attn.in_proj_b", QL_PLACE_GDN, true, QL_PART_VALUE_HEAD, "weight", LAYER(in_b)},
    [QL_ROLE_IN_A] = {"linear_attn.in_proj_a", QL_PLACE_GDN, true, QL_PART_VALUE_HEAD, "weight", LAYER(in_a)},
    [QL_ROLE_OUT] = {"linear_attn.out_proj", QL_PLACE_GDN, true, QL_PART_OUT, "weight", LAYER(out)},
    [QL_ROLE_CONV] = {"linear_attn.conv1d.weight", QL_PLACE_GDN, false, QL_PART_IN_QKV, "conv", LAYER(conv)},
    [QL_ROLE_A_LOG] = {"linear_attn.A_log", QL_PLACE_GDN, false, QL_PART_VALUE_HEAD, "decay", LAYER(a_log)},
    [QL_ROLE_DT_BIAS] = {"linear_attn.dt_bias", QL_PLACE_GDN, false, QL_PART_VALUE_HEAD, "bias", LAYER(dt_bias)},
    [QL_ROLE_GDN_NORM] = {"linear_attn.norm.weight", QL_PLACE_GDN, false, QL_PART_WHOLE, "norm", LAYER(gdn_norm)},

    [QL_ROLE_MTP_FC] = {"fc", QL_PLACE_MTP, true, QL_PART_WHOLE, "weight", GLOBAL(mtp.fc)},
    [QL_ROLE_MTP_NORM_EMBEDDING] = {"pre_fc_norm_embedding.weight", QL_PLACE_MTP, false, QL_PART_WHOLE, "norm",
                                    GLOBAL(mtp.norm_embedding)},
    [QL_ROLE_MTP_NORM_HIDDEN] = {"pre_fc_norm_hidden.weight", QL_PLACE_MTP, false, QL_PART_WHOLE, "norm",
                                 GLOBAL(mtp.norm_hidden)},
    [QL_ROLE_MTP_NORM] = {"norm.weight", QL_PLACE_MTP, false, QL_PART_WHOLE, "norm", GLOBAL(mtp.norm)},
};

const ql_role_info *ql_role_get(ql_role role) { return &roles[role]; }

int32_t ql_role_shape(const ql_config *c, ql_role role, int64_t shape[3]) {
    const int64_t hidden = c->hidden, head = QL_HEAD_DIM, gdn = QL_GDN_DIM;
    const int64_t channels = gdn * (2 * (int64_t)c->n_key_head + c->n_value_head);
    int64_t n = 0, k = 0; /* k = 0: rank 1 */
    switch (role) {
    case QL_ROLE_EMBED:
    case QL_ROLE_LM_HEAD: n = c->vocab, k = hidden; break;
    case QL_ROLE_GATE:
    case QL_ROLE_UP: n = c->intermediate, k = hidden; break;
    case QL_ROLE_DOWN: n = hidden, k = c->intermediate; break;
    case QL_ROLE_Q: n = 2 * head * c->n_head, k = hidden; break;
    case QL_ROLE_K:
    case QL_ROLE_V: n = head * c->n_kv_head, k = hidden; break;
    case QL_ROLE_O: n = hidden, k = head * c->n_head; break;
    case QL_ROLE_Q_NORM:
    case QL_ROLE_K_NORM: n = head; break;
    case QL_ROLE_IN_QKV: n = channels, k = hidden; break;
    case QL_ROLE_IN_Z: n = gdn * c->n_value_head, k = hidden; break;
    case QL_ROLE_IN_B:
    case QL_ROLE_IN_A: n = c->n_value_head, k = hidden; break;
    case QL_ROLE_OUT: n = hidden, k = gdn * c->n_value_head; break;
    case QL_ROLE_CONV: shape[0] = channels, shape[1] = 1, shape[2] = QL_CONV_TAPS; return 3;
    case QL_ROLE_A_LOG:
    case QL_ROLE_DT_BIAS: n = c->n_value_head; break;
    case QL_ROLE_GDN_NORM: n = gdn; break;
    case QL_ROLE_MTP_FC: n = hidden, k = 2 * hidden; break;
    default: n = hidden; break; /* the norms of width H */
    }
    shape[0] = n;
    shape[1] = k;
    return k ? 2 : 1;
}

static const void *member(const void *base, ql_role role) { return (const char *)base + roles[role].offset; }

static ql_status visit(const void *base, int32_t layer, ql_role role, ql_visit_fn fn, void *user, ql_error *err) {
    ql_visit v = {.layer = layer, .role = role, .part = roles[role].part};
    if (roles[role].linear) {
        v.linear = member(base, role);
    } else {
        v.tensor = *(const ql_tensor *const *)member(base, role);
    }
    return fn(user, &v, err);
}

static ql_status visit_layer(const ql_layer *layer, int32_t index, ql_visit_fn fn, void *user, ql_error *err) {
    for (int role = 0; role < QL_ROLE_COUNT; role++) {
        ql_place place = roles[role].place;
        if (place == QL_PLACE_LAYER || place == (layer->full_attention ? QL_PLACE_FULL : QL_PLACE_GDN)) {
            QL_TRY(visit(layer, index, (ql_role)role, fn, user, err));
        }
    }
    return QL_OK;
}

ql_status ql_checkpoint_each(const ql_checkpoint *c, bool with_mtp, ql_visit_fn fn, void *user, ql_error *err) {
    if (with_mtp && !c->has_mtp) {
        return ql_fail(err, QL_ERR_USAGE, "%s has no MTP module (no mtp.* tensors)", c->dir);
    }
    QL_TRY(visit(c, QL_LAYER_NONE, QL_ROLE_EMBED, fn, user, err));
    for (int32_t i = 0; i < c->config.n_layer; i++) {
        QL_TRY(visit_layer(&c->layer[i], i, fn, user, err));
    }
    QL_TRY(visit(c, QL_LAYER_NONE, QL_ROLE_NORM, fn, user, err));
    if (!c->config.tied) {
        QL_TRY(visit(c, QL_LAYER_NONE, QL_ROLE_LM_HEAD, fn, user, err));
    }
    if (with_mtp) {
        for (int role = QL_ROLE_MTP_FC; role <= QL_ROLE_MTP_NORM; role++) {
            QL_TRY(visit(c, QL_LAYER_NONE, (ql_role)role, fn, user, err));
        }
        QL_TRY(visit_layer(&c->mtp.layer, QL_LAYER_MTP, fn, user, err));
    }
    return QL_OK;
}
