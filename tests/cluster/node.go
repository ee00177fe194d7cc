package main

// Registration and heartbeat of the nodes, by virtual-kubelet.

import (
	"context"
	"fmt"
	"runtime"

	"github.com/virtual-kubelet/virtual-kubelet/node"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const kubernetesVersion = "v1.37.2"

func nodeNames(count int) []string {
	names := make([]string, count)
	for i := range names {
		names[i] = fmt.Sprintf("node-%d", i+1)
	}
	return names
}

// runNode keeps one Node object and its lease alive until ctx ends.
func runNode(ctx context.Context, client kubernetes.Interface, wanted *v1.Node) error {
	controller, err := node.NewNodeController(
		node.NaiveNodeProvider{}, wanted, client.CoreV1().Nodes(),
		node.WithNodeEnableLeaseV1(client.CoordinationV1().Leases(v1.NamespaceNodeLease), node.DefaultLeaseDuration),
	)
	if err != nil {
		return err
	}
	return controller.Run(ctx)
}

// buildNode describes a node. Only GPUs are meant to be scarce: the other
// capacities are large, for the scheduler must not stop on the machine's size.
func buildNode(name string, gpus, kubeletPort int) *v1.Node {
	capacity := v1.ResourceList{
		v1.ResourceCPU:              resource.MustParse("64"),
		v1.ResourceMemory:           resource.MustParse("512Gi"),
		v1.ResourceEphemeralStorage: resource.MustParse("1Ti"),
		v1.ResourcePods:             resource.MustParse("110"),
	}
	if gpus > 0 {
		capacity["nvidia.com/gpu"] = *resource.NewQuantity(int64(gpus), resource.DecimalSI)
	}
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				v1.LabelHostname:         name,
				v1.LabelOSStable:         "linux",
				v1.LabelArchStable:       runtime.GOARCH,
				"nvidia.com/gpu.product": "Simulated-GPU",
			},
		},
		Status: v1.NodeStatus{
			Capacity:    capacity,
			Allocatable: capacity.DeepCopy(),
			Conditions:  nodeConditions(),
			Addresses: []v1.NodeAddress{
				{Type: v1.NodeInternalIP, Address: "127.0.0.1"},
				{Type: v1.NodeHostName, Address: name},
			},
			DaemonEndpoints: v1.NodeDaemonEndpoints{
				KubeletEndpoint: v1.DaemonEndpoint{Port: int32(kubeletPort)},
			},
			NodeInfo: v1.NodeSystemInfo{
				OperatingSystem: "linux", Architecture: runtime.GOARCH, KubeletVersion: kubernetesVersion,
				ContainerRuntimeVersion: "process://1",
			},
		},
	}
}

func nodeConditions() []v1.NodeCondition {
	now := metav1.Now()
	condition := func(kind v1.NodeConditionType, status v1.ConditionStatus, reason string) v1.NodeCondition {
		return v1.NodeCondition{
			Type: kind, Status: status, Reason: reason, Message: "reported by the process node",
			LastHeartbeatTime: now, LastTransitionTime: now,
		}
	}
	return []v1.NodeCondition{
		condition(v1.NodeMemoryPressure, v1.ConditionFalse, "KubeletHasSufficientMemory"),
		condition(v1.NodeDiskPressure, v1.ConditionFalse, "KubeletHasNoDiskPressure"),
		condition(v1.NodePIDPressure, v1.ConditionFalse, "KubeletHasSufficientPID"),
		condition(v1.NodeReady, v1.ConditionTrue, "KubeletReady"),
	}
}
