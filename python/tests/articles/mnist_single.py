import sys

import torch
import torch.optim as optim

from mnist import Net, dataset, save_checkpoint, test, train_one_epoch

log_dir = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = Net().to(device)
data_loader = torch.utils.data.DataLoader(dataset(), batch_size=32, shuffle=True)
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
for epoch in range(1, 4):
    train_one_epoch(model, device, data_loader, optimizer, epoch)
    save_checkpoint(log_dir, model, optimizer, epoch)
test(log_dir, 3)
