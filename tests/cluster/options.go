package main

import (
	"flag"
	"fmt"
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
	kubeletPort    int
}

func parseOptions(command string, arguments []string) (options, error) {
	var o options
	var dir string
	flags := flag.NewFlagSet(command, flag.ContinueOnError)
	flags.StringVar(&dir, "dir", "", "folder of the cluster: empty, or one used by a cluster before")
	flags.IntVar(&o.nodes, "nodes", 3, "number of nodes")
	flags.IntVar(&o.gpus, "gpus", 1, "nvidia.com/gpu capacity of each node")
	flags.StringVar(&o.images, "images", "", "images file (default DIR/images.json)")
	flags.DurationVar(&o.restartBackoff, "restart-backoff", time.Second, "wait before the second restart of a container; doubles up to 30 times this")
	flags.IntVar(&o.owner, "owner", 0, "stop when the process with this id ends")
	flags.IntVar(&o.kubeletPort, "kubelet-port", 0, "set by the supervisor")
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	if dir == "" {
		return o, fmt.Errorf("%s needs --dir DIR", command)
	}
	if o.nodes < 1 || o.gpus < 0 {
		return o, fmt.Errorf("--nodes must be at least 1 and --gpus at least 0")
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
		"--kubelet-port", strconv.Itoa(o.kubeletPort),
	}
}
