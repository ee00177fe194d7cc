"""The product on a real kubelet, containerd and runc, as root (`make test-node`)."""
