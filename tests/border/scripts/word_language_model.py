"""An LSTM language model, truncated backpropagation, SGD written by hand."""

import torch
from common import arguments, finish, mean, norm, parallel, part, start
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, x, hidden):
        # x: [batch, time]; the hidden state has the batch second.
        output, hidden = self.rnn(self.encoder(x).transpose(0, 1), hidden)
        return torch.log_softmax(self.decoder(output.transpose(0, 1)), -1), hidden


def repackage_hidden(h):
    return tuple(x.detach() for x in h)


def main() -> None:
    args = arguments()
    rank, parts = start(args)
    torch.manual_seed(1)
    model = RNNModel(40, 16, 2)
    corpus = torch.randint(0, 40, (8, 31))
    net = parallel(model, args)
    criterion = nn.NLLLoss()
    lr, bptt, losses, norms = 2.0, 10, [], []
    hidden = tuple(torch.zeros(2, 8 // parts, 16) for _ in range(2))
    for i in range(0, 30, bptt):
        x = part(corpus[:, i : i + bptt], rank, parts)
        y = part(corpus[:, i + 1 : i + 1 + bptt], rank, parts)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = net(x, hidden)
        loss = criterion(output.reshape(-1, 40), y.reshape(-1))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.25)))
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        losses.append(mean(loss.item(), args))
    finish(args, losses=losses, norms=norms, norm=norm(model))


if __name__ == "__main__":
    main()
