"""Folding the group into the query rows is the same as repeating keys."""

import pytest
import torch

from hf_dspark.models.attention import fold_mask, grouped_attention


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("width", [1, 5])
def test_grouped_attention_equals_attention_with_repeated_keys(group, width):
    query, key, value = torch.randn(2, 2 * group, width, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    mask = torch.rand(2, 1, width, 11) < 0.6
    mask[..., 0] = True
    repeated = [states.repeat_interleave(group, dim=1) for states in (key, value)]
    for given in (mask, None):
        expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=given, scale=0.3)
        for folded in (1, group):
            actual = grouped_attention(query, key, value, fold_mask(given, folded, query.dtype), 0.3)
            torch.testing.assert_close(actual, expected)
    square = (query[:, :, :width], key[:, :, :width], value[:, :, :width])
    repeated = [states[:, :, :width].repeat_interleave(group, dim=1) for states in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True, scale=0.3)
    torch.testing.assert_close(grouped_attention(*square, None, 0.3, is_causal=True), expected)
