"""DCGAN: two models, two optimizers, BatchNorm, a detached fake batch."""

import torch
from common import arguments, finish, mean, norm, parallel, part, start
from torch import nn


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def main() -> None:
    args = arguments()
    rank, parts = start(args)
    torch.manual_seed(999)
    netG, netD = Generator(), Discriminator()
    images, noise = torch.randn(3, 8, 3, 8, 8), torch.randn(3, 8, 8, 1, 1)
    G, D = parallel(netG, args), parallel(netD, args)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    losses = []
    for step in range(3):
        real = part(images[step], rank, parts)
        netD.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        errD_real = criterion(D(real), label)
        errD_real.backward()
        fake = G(part(noise[step], rank, parts))
        label.fill_(0.0)
        errD_fake = criterion(D(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(D(fake), label)
        errG.backward()
        optimizerG.step()
        losses.append(mean((errD_real + errD_fake).item(), args))
        losses.append(mean(errG.item(), args))
    stats = [float(b.double().norm()) for b in netD.buffers()]
    finish(args, losses=losses, norm=norm(netG, netD), buffers=stats)


if __name__ == "__main__":
    main()
