// One binary that is a whole Kubernetes cluster: the real etcd, API server,
// controller manager, scheduler and kubectl, chosen by the first argument, and
// a node agent of our own that runs pods as local processes.
//
// It exists so that tests and the demo talk to the real thing on a machine
// without Docker and without root. See README.md for what the node can and
// cannot do.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

const usage = `usage: cluster COMMAND [flags]

  up --dir DIR [--nodes 3] [--gpus 1] [--images FILE] [--restart-backoff 1s] [--owner PID]
     [--node-address IP]
        start a cluster in the background; writes DIR/kubeconfig and DIR/cluster.json
  down --dir DIR
        stop that cluster and every process of its pods
  kubectl ARGS...
        the real kubectl

  etcd, kube-apiserver, kube-controller-manager, kube-scheduler ARGS...
        the real components, started by "up"
`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	command := os.Args[1]
	// The embedded commands parse os.Args themselves and print its first word.
	os.Args = os.Args[1:]
	switch command {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(manager.NewControllerManagerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kubectl":
		os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
	case "up":
		exitOn(up(os.Args[1:]))
	case "down":
		exitOn(down(os.Args[1:]))
	case "supervise":
		exitOn(supervise(os.Args[1:]))
	case "agent":
		exitOn(runAgent(os.Args[1:]))
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
