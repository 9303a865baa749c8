"""Contrastive learning on two views, BatchNorm, an exponential average of weights, a
supervised head with label smoothing on what is detached, metrics that are counted."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import arguments, finish, mean, norm, parallel, part, start
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.project = nn.Linear(16, 8)
        self.head = nn.Linear(16, 5)

    def features(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x))).mean((2, 3))

    def forward(self, one, two, target):
        h1, h2 = self.features(one), self.features(two)
        z1, z2 = F.normalize(self.project(h1)), F.normalize(self.project(h2))
        logits = z1 @ z2.t() / 0.5
        labels = torch.arange(len(z1), device=z1.device)
        contrast = F.cross_entropy(logits, labels)
        scores = self.head(h1.detach())
        supervised = F.cross_entropy(scores, target, label_smoothing=0.1)
        correct = (scores.argmax(1) == target).sum()
        return contrast, supervised, correct


def main() -> None:
    args = arguments()
    rank, parts = start(args)
    torch.manual_seed(5)
    raw = Net()
    ema = copy.deepcopy(raw)
    views = torch.randn(3, 2, 8, 3, 8, 8)
    targets = torch.randint(0, 5, (3, 8))
    model = parallel(raw, args)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
    losses, counted = [], torch.zeros(())
    for step in range(3):
        one, two = (part(x, rank, parts) for x in views[step])
        target = part(targets[step], rank, parts)
        contrast, supervised, correct = model(one, two, target)
        loss = contrast + 0.5 * supervised
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), raw.parameters(), strict=True):
                a.lerp_(b, 0.1)
        losses.append(mean(loss.item(), args))
        counted += correct
    if parts > 1:
        dist.all_reduce(counted)
    finish(args, losses=losses, correct=counted.item(), norm=norm(raw, ema))


if __name__ == "__main__":
    main()
