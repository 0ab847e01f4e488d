"""Starting a run again after a crash, on this machine and on the hosts of a hostfile."""
