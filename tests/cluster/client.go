package main

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// newClient talks to the cluster of dir as one of its identities.
func newClient(dir folder, identity string) (*kubernetes.Clientset, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfigPath(dir, identity))
	if err != nil {
		return nil, err
	}
	// The default of 5 requests a second would delay status reports.
	config.QPS, config.Burst = 1000, 1000
	return kubernetes.NewForConfig(config)
}

func apiserverReady(ctx context.Context, client kubernetes.Interface) error {
	return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
}

// clusterReady waits for what a first Pod needs: nodes that take it and the
// default ServiceAccount.
func clusterReady(ctx context.Context, client kubernetes.Interface, nodes int) error {
	if _, err := client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{}); err != nil {
		return err
	}
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(list.Items) < nodes {
		return fmt.Errorf("%d of %d nodes are registered", len(list.Items), nodes)
	}
	for _, node := range list.Items {
		if len(node.Spec.Taints) > 0 || !isNodeReady(&node) {
			return fmt.Errorf("node %s is not ready", node.Name)
		}
	}
	return nil
}

func isNodeReady(node *v1.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == v1.NodeReady {
			return condition.Status == v1.ConditionTrue
		}
	}
	return false
}
