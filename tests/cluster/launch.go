package main

// From a container's spec to a command line, an environment and a folder.

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/third_party/forked/golang/expansion"
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
	rewrite, err := c.buildRewriter(l, variables)
	if err != nil {
		return nil, err
	}
	l.argv = c.buildArguments(found, variables, rewrite)
	if len(l.argv) == 0 {
		return nil, &notYet{reason: "CreateContainerError", message: "no command specified: neither the image nor the container has one"}
	}
	l.environment = c.buildEnvironment(found, variables, rewrite, l)
	l.workdir, err = c.findWorkdir(found, rewrite, l)
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
func (c *container) buildRewriter(l *launch, variables []v1.EnvVar) (*rewriter, error) {
	rewrite := newRewriter()
	c.pod.mu.Lock()
	volumes := maps.Clone(c.pod.volumes)
	for declared, port := range c.pod.ports {
		rewrite.addPort(declared, port.number)
	}
	c.pod.mu.Unlock()
	rewrite.addPath(c.spec.TerminationMessagePath, l.messagePath)
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
		rewrite.addPath(mount.MountPath, source)
	}
	return rewrite, nil
}

// buildArguments follows Kubernetes: command replaces the entrypoint, args come
// after it, and $(NAME) sees the container's own variables only.
func (c *container) buildArguments(found *image, variables []v1.EnvVar, rewrite *rewriter) []string {
	mapping := mappingOf(variables)
	argv := append([]string{}, found.Entrypoint...)
	if len(c.spec.Command) > 0 {
		argv = nil
		for _, word := range c.spec.Command {
			argv = append(argv, expansion.Expand(word, mapping))
		}
	}
	for _, word := range c.spec.Args {
		argv = append(argv, expansion.Expand(word, mapping))
	}
	return rewrite.arguments(argv)
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
func (c *container) buildEnvironment(found *image, variables []v1.EnvVar, rewrite *rewriter, l *launch) []string {
	values := map[string]string{
		"PATH":     os.Getenv("PATH"),
		"HOME":     filepath.Join(l.folder, "home"),
		"LANG":     "C.UTF-8",
		"HOSTNAME": c.pod.current().Name,
	}
	for name, value := range found.Env {
		values[name] = rewrite.value(value)
	}
	for _, variable := range variables {
		values[variable.Name] = rewrite.value(variable.Value)
	}
	values[ownerVariable] = l.folder + "/"
	var environment []string
	for name, value := range values {
		environment = append(environment, name+"="+value)
	}
	return environment
}

func (c *container) findWorkdir(found *image, rewrite *rewriter, l *launch) (string, error) {
	workdir := found.Workdir
	if c.spec.WorkingDir != "" {
		workdir = rewrite.path(c.spec.WorkingDir)
	}
	if workdir == "" {
		return filepath.Join(l.folder, "home"), nil
	}
	if info, err := os.Stat(workdir); err != nil || !info.IsDir() {
		return "", &notYet{reason: "CreateContainerError", message: fmt.Sprintf("working directory %q does not exist on this machine", workdir)}
	}
	return workdir, nil
}

// rewriter replaces the paths and ports that a container believes in by those
// that its process gets on this machine.
type rewriter struct {
	paths []pathPair
	ports map[string]string
}

type pathPair struct{ inside, outside string }

func newRewriter() *rewriter { return &rewriter{ports: map[string]string{}} }

// addPath keeps the longest paths first, so that nested mounts win.
func (r *rewriter) addPath(inside, outside string) {
	inside = strings.TrimRight(inside, "/")
	if inside == "" {
		return
	}
	position := 0
	for position < len(r.paths) && len(r.paths[position].inside) >= len(inside) {
		position++
	}
	r.paths = append(r.paths[:position], append([]pathPair{{inside, outside}}, r.paths[position:]...)...)
}

func (r *rewriter) addPort(inside, outside int) {
	r.ports[fmt.Sprint(inside)] = fmt.Sprint(outside)
}

// arguments replaces paths anywhere, and a port where it is a whole word that
// is positional ("8000") or the value of a port flag ("--port 8000",
// "--port=8000", "-p 8000"). Other flags keep their numbers.
func (r *rewriter) arguments(argv []string) []string {
	rewritten := make([]string, len(argv))
	for i, word := range argv {
		flag, value, joined := strings.Cut(word, "=")
		switch {
		case joined && isPortFlag(flag) && r.ports[value] != "":
			word = flag + "=" + r.ports[value]
		case r.ports[word] != "" && (i == 0 || !strings.HasPrefix(argv[i-1], "-") || isPortFlag(argv[i-1])):
			word = r.ports[word]
		}
		rewritten[i] = r.path(word)
	}
	return rewritten
}

func isPortFlag(flag string) bool {
	return flag == "-p" || strings.HasPrefix(flag, "-") && strings.HasSuffix(flag, "port")
}

// value rewrites an environment variable.
func (r *rewriter) value(value string) string {
	if port := r.ports[value]; port != "" {
		return port
	}
	return r.path(value)
}

// path replaces every mount path in a text that stands there as a path of its
// own: not in the middle of a longer one, nor as the start of a longer name.
func (r *rewriter) path(text string) string {
	var result strings.Builder
	for position := 0; position < len(text); {
		pair := r.pathAt(text, position)
		if pair == nil {
			result.WriteByte(text[position])
			position++
			continue
		}
		result.WriteString(pair.outside)
		position += len(pair.inside)
	}
	return result.String()
}

func (r *rewriter) pathAt(text string, position int) *pathPair {
	if text[position] != '/' || position > 0 && isNameByte(text[position-1]) {
		return nil
	}
	for i := range r.paths {
		end := position + len(r.paths[i].inside)
		if strings.HasPrefix(text[position:], r.paths[i].inside) && (end == len(text) || !isNameByte(text[end]) || text[end] == '/') {
			return &r.paths[i]
		}
	}
	return nil
}

// isNameByte is true of what continues a path.
func isNameByte(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || strings.IndexByte("_-./~", b) >= 0
}
