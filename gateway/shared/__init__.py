"""What the processes of one gateway share: counts in memory, notes on sockets. The arithmetic is in pure rooms."""
