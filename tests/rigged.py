"""Drafts that know the answer up to a place: what they propose is right, wrong or both, as a test wants it."""

from dataclasses import replace

import torch

from hf_dspark.decoding.drafter import Drafter


def rig(monkeypatch, answers, right_part=0.7, seed=0):
    """Make all drafters propose the tokens of `answers`, by request id whole rows without padding, and err at random.

    A token is right with probability `right_part`. Returns the list of proposed blocks, filled as rounds go by.
    """
    propose, generator, proposed = Drafter.propose, torch.Generator().manual_seed(seed), []

    def rigged(self, requests, noise):
        proposal = propose(self, requests, noise)
        if not proposal.drafted:
            return proposal
        token_ids = proposal.drafts.token_ids.clone()
        for row, request in enumerate(requests):
            coming = answers[request.id][len(request.token_ids) :][: token_ids.shape[1]]
            token_ids[row, : len(coming)] = coming
        wrong = torch.rand(token_ids.shape, generator=generator) > right_part
        token_ids = torch.where(wrong, (token_ids + 1) % self.draft.config.vocab_size, token_ids)
        proposed.append(token_ids)
        return replace(proposal, drafts=replace(proposal.drafts, token_ids=token_ids, rows=token_ids.tolist()))

    monkeypatch.setattr(Drafter, "propose", rigged)
    return proposed
