package main

// Volumes as folders. ConfigMap, Secret, downward API and projected volumes are
// laid out by the kubelet's own writer: files behind a ..data link that is
// swapped atomically.

import (
	"context"
	"fmt"
	"maps"
	"os"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/volume/configmap"
	"k8s.io/kubernetes/pkg/volume/downwardapi"
	"k8s.io/kubernetes/pkg/volume/secret"
	volumeutil "k8s.io/kubernetes/pkg/volume/util"
)

type payload = map[string]volumeutil.FileProjection

// setUpVolumes makes the volumes, or brings those up to date that follow an
// object. What cannot be read leaves the old content in place.
func (p *podRunner) setUpVolumes() error {
	pod := p.current()
	var failed error
	for i := range pod.Spec.Volumes {
		volume := &pod.Spec.Volumes[i]
		path, err := p.setUpVolume(pod, volume)
		if err != nil {
			failed = fmt.Errorf("MountVolume.SetUp failed for volume %q : %w", volume.Name, err)
			continue
		}
		p.mu.Lock()
		p.volumes[volume.Name] = path
		p.mu.Unlock()
	}
	return failed
}

func (p *podRunner) setUpVolume(pod *v1.Pod, volume *v1.Volume) (string, error) {
	if volume.HostPath != nil {
		return volume.HostPath.Path, checkHostPath(volume.HostPath)
	}
	path := p.folder.path("volumes", volume.Name)
	if volume.EmptyDir != nil {
		return path, os.MkdirAll(path, 0o777)
	}
	content, err := p.volumeContent(p.starting, pod, volume)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return "", err
	}
	writer, err := volumeutil.NewAtomicWriter(path, "pod "+pod.Namespace+"/"+pod.Name)
	if err != nil {
		return "", err
	}
	return path, writer.Write(content, nil)
}

func checkHostPath(source *v1.HostPathVolumeSource) error {
	kind := v1.HostPathUnset
	if source.Type != nil {
		kind = *source.Type
	}
	if kind == v1.HostPathDirectoryOrCreate {
		return os.MkdirAll(source.Path, 0o755)
	}
	if kind == v1.HostPathFileOrCreate {
		file, err := os.OpenFile(source.Path, os.O_CREATE|os.O_RDONLY, 0o644)
		if err == nil {
			file.Close()
		}
		return err
	}
	info, err := os.Stat(source.Path)
	switch {
	case err != nil && kind == v1.HostPathUnset:
		return nil
	case err != nil:
		return fmt.Errorf("hostPath type check failed: %w", err)
	case kind == v1.HostPathDirectory && !info.IsDir(), kind == v1.HostPathFile && !info.Mode().IsRegular():
		return fmt.Errorf("hostPath type check failed: %s is not a %s", source.Path, kind)
	}
	return nil
}

func (p *podRunner) volumeContent(ctx context.Context, pod *v1.Pod, volume *v1.Volume) (payload, error) {
	switch {
	case volume.ConfigMap != nil:
		source := volume.ConfigMap
		return p.configMapContent(ctx, source.Name, source.Items, source.DefaultMode, isTrue(source.Optional))
	case volume.Secret != nil:
		source := volume.Secret
		return p.secretContent(ctx, source.SecretName, source.Items, source.DefaultMode, isTrue(source.Optional))
	case volume.DownwardAPI != nil:
		return downwardContent(pod, volume.DownwardAPI.Items, volume.DownwardAPI.DefaultMode)
	case volume.Projected != nil:
		return p.projectedContent(ctx, pod, volume)
	case volume.PersistentVolumeClaim != nil:
		return nil, fmt.Errorf("persistentVolumeClaim is not supported by the process node: use hostPath or emptyDir")
	}
	return nil, fmt.Errorf("this kind of volume is not supported by the process node")
}

func (p *podRunner) configMapContent(ctx context.Context, name string, items []v1.KeyToPath, mode *int32, optional bool) (payload, error) {
	found, err := p.getConfigMap(ctx, name, optional)
	if err != nil {
		return nil, err
	}
	return configmap.MakePayload(items, found, mode, nil, optional)
}

func (p *podRunner) secretContent(ctx context.Context, name string, items []v1.KeyToPath, mode *int32, optional bool) (payload, error) {
	found, err := p.getSecret(ctx, name, optional)
	if err != nil {
		return nil, err
	}
	return secret.MakePayload(items, found, mode, nil, optional)
}

func downwardContent(pod *v1.Pod, items []v1.DownwardAPIVolumeFile, mode *int32) (payload, error) {
	for _, item := range items {
		if item.ResourceFieldRef != nil {
			return nil, fmt.Errorf("resourceFieldRef is not supported by the process node")
		}
	}
	return downwardapi.CollectData(items, pod, nil, mode, nil)
}

func (p *podRunner) projectedContent(ctx context.Context, pod *v1.Pod, volume *v1.Volume) (payload, error) {
	mode := volume.Projected.DefaultMode
	merged := payload{}
	for _, source := range volume.Projected.Sources {
		var part payload
		var err error
		switch {
		case source.ConfigMap != nil:
			part, err = p.configMapContent(ctx, source.ConfigMap.Name, source.ConfigMap.Items, mode, isTrue(source.ConfigMap.Optional))
		case source.Secret != nil:
			part, err = p.secretContent(ctx, source.Secret.Name, source.Secret.Items, mode, isTrue(source.Secret.Optional))
		case source.DownwardAPI != nil:
			part, err = downwardContent(pod, source.DownwardAPI.Items, mode)
		case source.ServiceAccountToken != nil:
			part, err = p.tokenContent(ctx, pod, volume.Name, source.ServiceAccountToken)
		default:
			err = fmt.Errorf("this kind of projected source is not supported by the process node")
		}
		if err != nil {
			return nil, err
		}
		maps.Copy(merged, part)
	}
	return merged, nil
}

// tokenContent asks for a token bound to the pod, and for a new one when half
// of its life is over.
func (p *podRunner) tokenContent(ctx context.Context, pod *v1.Pod, volume string, source *v1.ServiceAccountTokenProjection) (payload, error) {
	key := volume + "/" + source.Path
	token := p.tokens[key]
	if token == nil || token.halfLifeOver() {
		request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			ExpirationSeconds: source.ExpirationSeconds,
			BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID},
		}}
		if source.Audience != "" {
			request.Spec.Audiences = []string{source.Audience}
		}
		answer, err := p.agent.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(
			ctx, pod.Spec.ServiceAccountName, request, metav1.CreateOptions{})
		if err != nil {
			return nil, err
		}
		token = newPodToken(answer)
		p.tokens[key] = token
	}
	return payload{source.Path: {Data: []byte(token.value), Mode: 0o600}}, nil
}
