package main

// Environment variables of a container, resolved as a kubelet does.

import (
	"context"
	"fmt"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/kubernetes/pkg/fieldpath"
	"k8s.io/kubernetes/pkg/kubelet/envvars"
	"k8s.io/kubernetes/third_party/forked/golang/expansion"
)

// resolveEnvironment returns service links, then envFrom, then env; of equal
// names the later one holds.
func (p *podRunner) resolveEnvironment(ctx context.Context, spec *v1.Container) ([]v1.EnvVar, error) {
	values := map[string]string{}
	if err := p.addServiceLinks(values); err != nil {
		return nil, err
	}
	for _, source := range spec.EnvFrom {
		if err := p.addFrom(ctx, values, source); err != nil {
			return nil, err
		}
	}
	mapping := expansion.MappingFuncFor(values)
	for _, variable := range spec.Env {
		value, present, err := p.resolveVariable(ctx, variable)
		if err != nil {
			return nil, err
		}
		if variable.ValueFrom == nil {
			value = expansion.Expand(variable.Value, mapping)
		}
		if present {
			values[variable.Name] = value
		}
	}
	var variables []v1.EnvVar
	for _, name := range slices.Sorted(maps.Keys(values)) {
		variables = append(variables, v1.EnvVar{Name: name, Value: values[name]})
	}
	return variables, nil
}

// addServiceLinks adds NAME_SERVICE_HOST and the like. They matter: a Service
// called "vllm" sets VLLM_PORT, which the engine then tries to understand.
func (p *podRunner) addServiceLinks(values map[string]string) error {
	pod := p.current()
	services, err := p.agent.services.List(labels.Everything())
	if err != nil {
		return err
	}
	links := pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks
	var linked []*v1.Service
	for _, service := range services {
		isMaster := service.Namespace == metav1.NamespaceDefault && service.Name == "kubernetes"
		hasAddress := service.Spec.ClusterIP != "" && service.Spec.ClusterIP != v1.ClusterIPNone
		if hasAddress && (isMaster || links && service.Namespace == pod.Namespace) {
			linked = append(linked, service)
		}
	}
	for _, variable := range envvars.FromServices(linked) {
		values[variable.Name] = variable.Value
	}
	// Cluster IPs lead nowhere here, but the API server can be reached.
	values["KUBERNETES_SERVICE_HOST"] = p.agent.apiserver.Hostname()
	values["KUBERNETES_SERVICE_PORT"] = p.agent.apiserver.Port()
	return nil
}

func (p *podRunner) addFrom(ctx context.Context, values map[string]string, source v1.EnvFromSource) error {
	data := map[string]string{}
	switch {
	case source.ConfigMapRef != nil:
		found, err := p.getConfigMap(ctx, source.ConfigMapRef.Name, isTrue(source.ConfigMapRef.Optional))
		if err != nil {
			return err
		}
		maps.Copy(data, found.Data)
	case source.SecretRef != nil:
		found, err := p.getSecret(ctx, source.SecretRef.Name, isTrue(source.SecretRef.Optional))
		if err != nil {
			return err
		}
		for key, value := range found.Data {
			data[key] = string(value)
		}
	}
	for key, value := range data {
		values[source.Prefix+key] = value
	}
	return nil
}

// resolveVariable says false beside a value that is optional and missing.
func (p *podRunner) resolveVariable(ctx context.Context, variable v1.EnvVar) (string, bool, error) {
	from := variable.ValueFrom
	switch {
	case from == nil:
		return variable.Value, true, nil
	case from.FieldRef != nil:
		value, err := p.fieldValue(from.FieldRef.FieldPath)
		return value, true, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		found, err := p.getConfigMap(ctx, ref.Name, isTrue(ref.Optional))
		if err != nil {
			return "", false, err
		}
		value, ok := found.Data[ref.Key]
		return value, ok, missingKey(ok || isTrue(ref.Optional), ref.Key, "ConfigMap", ref.Name)
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		found, err := p.getSecret(ctx, ref.Name, isTrue(ref.Optional))
		if err != nil {
			return "", false, err
		}
		value, ok := found.Data[ref.Key]
		return string(value), ok, missingKey(ok || isTrue(ref.Optional), ref.Key, "Secret", ref.Name)
	}
	return "", false, fmt.Errorf("environment variable %s: this node supports value, fieldRef, configMapKeyRef and secretKeyRef only", variable.Name)
}

func missingKey(fine bool, key, kind, name string) error {
	if fine {
		return nil
	}
	return fmt.Errorf("couldn't find key %s in %s %s", key, kind, name)
}

// fieldValue reads the status fields from what we report, for the object may
// not carry them yet.
func (p *podRunner) fieldValue(path string) (string, error) {
	pod := p.current()
	switch path {
	case "spec.nodeName":
		return pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.podIP", "status.podIPs":
		return p.agent.podIP, nil
	case "status.hostIP", "status.hostIPs":
		return "127.0.0.1", nil
	}
	return fieldpath.ExtractFieldPathAsString(pod, path)
}

// getConfigMap asks the API server itself: a cache could answer with the
// content from before the change that we are told to follow.
func (p *podRunner) getConfigMap(ctx context.Context, name string, optional bool) (*v1.ConfigMap, error) {
	found, err := p.agent.client.CoreV1().ConfigMaps(p.current().Namespace).Get(ctx, name, metav1.GetOptions{})
	if optional && apierrors.IsNotFound(err) {
		return &v1.ConfigMap{}, nil
	}
	return found, err
}

func (p *podRunner) getSecret(ctx context.Context, name string, optional bool) (*v1.Secret, error) {
	found, err := p.agent.client.CoreV1().Secrets(p.current().Namespace).Get(ctx, name, metav1.GetOptions{})
	if optional && apierrors.IsNotFound(err) {
		return &v1.Secret{}, nil
	}
	return found, err
}

func isTrue(flag *bool) bool { return flag != nil && *flag }
