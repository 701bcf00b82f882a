from draftsmith.nn.losses import DraftLoss


def soft_loss(hidden, *, head, target_hidden, labels, weights, softcap=None):
    def cap(x):
        return x if softcap is None else (x / softcap).tanh() * softcap

    d = cap((hidden @ head.T).float()).log_softmax(-1)
    t = cap((target_hidden @ head.T).float()).softmax(-1)
    ce = -((t * d).sum(-1) * weights).sum()
    gap = (d.exp() - t).abs().sum(-1)
    return DraftLoss(ce, ce.detach(), (gap * weights).sum().detach(), (1 - 0.5 * gap).detach(), d.argmax(-1) == labels)
