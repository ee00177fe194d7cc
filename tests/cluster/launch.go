package main

// From a container's spec to a command line, an environment and a folder.

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/third_party/forked/golang/expansion"
	"specdecode.io/tests/cluster/rewrite"
)

// launch is all that is needed to start a process.
type launch struct {
	number      int
	argv        []string
	environment []string
	workdir     string
	folder      string
	messagePath string
	imageID     string
}

// prepareLaunch makes the folder of a run and reads everything anew, as each
// start of a container does.
func (c *container) prepareLaunch(ctx context.Context, number int) (*launch, error) {
	found, err := lookupImage(c.pod.agent.images, c.spec.Image)
	if err != nil {
		return nil, &notYet{reason: "ErrImagePull", message: err.Error()}
	}
	variables, err := c.pod.resolveEnvironment(ctx, c.spec)
	if err != nil {
		return nil, err
	}
	l := &launch{number: number, folder: c.folder(number), imageID: found.id(c.spec.Image)}
	l.messagePath = filepath.Join(l.folder, "termination-log")
	if err := makeRunFolder(l); err != nil {
		return nil, err
	}
	rewriter, err := c.buildRewriter(l, variables)
	if err != nil {
		return nil, err
	}
	l.argv = c.buildArguments(found, variables, rewriter)
	if len(l.argv) == 0 {
		return nil, &notYet{reason: "CreateContainerError", message: "no command specified: neither the image nor the container has one"}
	}
	l.environment = c.buildEnvironment(found, variables, rewriter, l)
	l.workdir, err = c.findWorkdir(found, rewriter, l)
	return l, err
}

// makeRunFolder starts each run with an empty folder and message file.
func makeRunFolder(l *launch) error {
	if err := os.RemoveAll(l.folder); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(l.folder, "home"), 0o700); err != nil {
		return err
	}
	return os.WriteFile(l.messagePath, nil, 0o600)
}

// buildRewriter knows where each mount and port of this container really is.
func (c *container) buildRewriter(l *launch, variables []v1.EnvVar) (*rewrite.Rewriter, error) {
	rewriter := rewrite.New()
	c.pod.mu.Lock()
	volumes := maps.Clone(c.pod.volumes)
	for declared, port := range c.pod.ports {
		rewriter.AddPort(declared, port.number)
	}
	c.pod.mu.Unlock()
	rewriter.AddPath(c.spec.TerminationMessagePath, l.messagePath)
	for _, mount := range c.spec.VolumeMounts {
		source, ok := volumes[mount.Name]
		if !ok {
			return nil, fmt.Errorf("volume %q is not set up", mount.Name)
		}
		inside := mount.SubPath
		if mount.SubPathExpr != "" {
			inside = expansion.Expand(mount.SubPathExpr, mappingOf(variables))
		}
		if inside != "" {
			if !filepath.IsLocal(inside) {
				return nil, fmt.Errorf("subPath %q of volume %q leaves the volume", inside, mount.Name)
			}
			source = filepath.Join(source, inside)
			if _, err := os.Stat(source); err != nil {
				if err := os.MkdirAll(source, 0o777); err != nil {
					return nil, err
				}
			}
		}
		rewriter.AddPath(mount.MountPath, source)
	}
	return rewriter, nil
}

// buildArguments follows Kubernetes: command replaces the entrypoint, args come
// after it, and $(NAME) sees the container's own variables only.
func (c *container) buildArguments(found *image, variables []v1.EnvVar, rewriter *rewrite.Rewriter) []string {
	mapping := mappingOf(variables)
	var argv []string
	for _, word := range append(append([]string{}, c.spec.Command...), c.spec.Args...) {
		argv = append(argv, expansion.Expand(word, mapping))
	}
	argv = rewriter.Arguments(argv)
	if len(c.spec.Command) > 0 {
		return argv
	}
	// What the image brings are paths of this machine, which a mount over /tmp must not move.
	return append(append([]string{}, found.Entrypoint...), argv...)
}

func mappingOf(variables []v1.EnvVar) func(string) string {
	values := map[string]string{}
	for _, variable := range variables {
		values[variable.Name] = variable.Value
	}
	return expansion.MappingFuncFor(values)
}

// buildEnvironment puts the container's variables over the image's; of our own
// environment only PATH is passed on.
func (c *container) buildEnvironment(found *image, variables []v1.EnvVar, rewriter *rewrite.Rewriter, l *launch) []string {
	values := map[string]string{
		"PATH":     os.Getenv("PATH"),
		"HOME":     filepath.Join(l.folder, "home"),
		"LANG":     "C.UTF-8",
		"HOSTNAME": c.pod.current().Name,
	}
	for name, value := range found.Env {
		values[name] = value // a path of this machine, as the entrypoint
	}
	for _, variable := range variables {
		values[variable.Name] = rewriter.Value(variable.Value)
	}
	values[ownerVariable] = l.folder + "/"
	var environment []string
	for name, value := range values {
		environment = append(environment, name+"="+value)
	}
	return environment
}

func (c *container) findWorkdir(found *image, rewriter *rewrite.Rewriter, l *launch) (string, error) {
	workdir := found.Workdir
	if c.spec.WorkingDir != "" {
		workdir = rewriter.Path(c.spec.WorkingDir)
	}
	if workdir == "" {
		return filepath.Join(l.folder, "home"), nil
	}
	if info, err := os.Stat(workdir); err != nil || !info.IsDir() {
		return "", &notYet{reason: "CreateContainerError", message: fmt.Sprintf("working directory %q does not exist on this machine", workdir)}
	}
	return workdir, nil
}
