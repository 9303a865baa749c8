"""A variational autoencoder: sums as losses, a smaller last batch, averages outside."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import arguments, finish, norm, parallel, start
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(36, 24)
        self.fc21, self.fc22 = nn.Linear(24, 4), nn.Linear(24, 4)
        self.fc3, self.fc4 = nn.Linear(4, 24), nn.Linear(24, 36)

    def forward(self, x, eps):
        h = F.relu(self.fc1(x.view(-1, 36)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + eps * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def main() -> None:
    args = arguments()
    rank, parts = start(args)
    torch.manual_seed(3)
    model = VAE()
    data = TensorDataset(torch.rand(20, 6, 6), torch.randn(20, 4))
    sampler = None
    if parts > 1:
        sampler = DistributedSampler(data, shuffle=False)
    # 20 samples in batches of 8: the last one has 4.
    loader = DataLoader(data, batch_size=8 // parts, sampler=sampler)
    net = parallel(model, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    averages, norms = [], []
    for _ in range(2):
        train_loss = 0.0
        for x, eps in loader:
            optimizer.zero_grad()
            recon, mu, logvar = net(x, eps)
            loss = loss_function(recon, x, mu, logvar)
            loss.backward()
            grads = [p.grad.norm() for p in model.parameters()]
            norms.append(float(torch.stack(grads).norm()) * parts)
            train_loss += loss.item()
            optimizer.step()
        total = torch.tensor(train_loss)
        if parts > 1:
            dist.all_reduce(total)
        averages.append(total.item() / len(data))
    # Adam does not see the factor that DDP's mean leaves in the gradient of a sum.
    finish(args, losses=averages, norms=norms, norm=norm(model))


if __name__ == "__main__":
    main()
