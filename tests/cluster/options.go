package main

import (
	"flag"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"time"
)

// options are the flags of "up"; the supervisor and the agent get them again.
type options struct {
	dir            folder
	nodes          int
	gpus           int
	images         string
	restartBackoff time.Duration
	owner          int
	nodeAddress    string
	kubeletPort    int
}

func parseOptions(command string, arguments []string) (options, error) {
	var o options
	var dir string
	flags := flag.NewFlagSet(command, flag.ContinueOnError)
	flags.StringVar(&dir, "dir", "", "folder of the cluster: empty, or one used by a cluster before")
	flags.IntVar(&o.nodes, "nodes", 3, "number of process nodes; 0 for the control plane alone, which a kubelet may join")
	flags.IntVar(&o.gpus, "gpus", 1, "nvidia.com/gpu capacity of each node")
	flags.StringVar(&o.images, "images", "", "images file (default DIR/images.json)")
	flags.DurationVar(&o.restartBackoff, "restart-backoff", time.Second, "wait before the second restart of a container; doubles up to 30 times this")
	flags.IntVar(&o.owner, "owner", 0, "stop when the process with this id ends")
	flags.StringVar(&o.nodeAddress, "node-address", "", "address of a kubelet that will join, named in the certificates")
	flags.IntVar(&o.kubeletPort, "kubelet-port", 0, "set by the supervisor")
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	if dir == "" {
		return o, fmt.Errorf("%s needs --dir DIR", command)
	}
	if o.nodes < 0 || o.gpus < 0 {
		return o, fmt.Errorf("--nodes and --gpus must be at least 0")
	}
	if o.nodeAddress != "" && net.ParseIP(o.nodeAddress) == nil {
		return o, fmt.Errorf("--node-address must be an IP address, not %q", o.nodeAddress)
	}
	absolute, err := filepath.Abs(dir)
	if err != nil {
		return o, err
	}
	// Other processes compare this path with what the kernel reports.
	if resolved, err := filepath.EvalSymlinks(absolute); err == nil {
		absolute = resolved
	}
	o.dir = folder(absolute)
	if o.images == "" {
		o.images = o.dir.path("images.json")
	}
	if o.images, err = filepath.Abs(o.images); err != nil {
		return o, err
	}
	return o, nil
}

func (o options) arguments(command string) []string {
	return []string{
		command,
		"--dir", string(o.dir),
		"--nodes", strconv.Itoa(o.nodes),
		"--gpus", strconv.Itoa(o.gpus),
		"--images", o.images,
		"--restart-backoff", o.restartBackoff.String(),
		"--owner", strconv.Itoa(o.owner),
		"--node-address", o.nodeAddress,
		"--kubelet-port", strconv.Itoa(o.kubeletPort),
	}
}
