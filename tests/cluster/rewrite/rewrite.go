// Package rewrite replaces the paths and ports that a container believes in by
// those that its process really has on this machine, where nothing can be
// mounted and the network is shared.
package rewrite

import (
	"fmt"
	"strings"
)

// Rewriter replaces paths and ports; make one by New.
type Rewriter struct {
	paths []pathPair
	ports map[string]string
}

type pathPair struct{ inside, outside string }

// New returns a Rewriter that changes nothing yet.
func New() *Rewriter { return &Rewriter{ports: map[string]string{}} }

// AddPath keeps the longest paths first, so that nested mounts win.
func (r *Rewriter) AddPath(inside, outside string) {
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

// AddPort lets a declared port stand for another one.
func (r *Rewriter) AddPort(inside, outside int) {
	r.ports[fmt.Sprint(inside)] = fmt.Sprint(outside)
}

// Arguments replaces paths anywhere, and a port where it is a whole word that
// is positional ("8000") or the value of a port flag ("--port 8000",
// "--port=8000", "-p 8000"). Other flags keep their numbers.
func (r *Rewriter) Arguments(argv []string) []string {
	rewritten := make([]string, len(argv))
	for i, word := range argv {
		flag, value, joined := strings.Cut(word, "=")
		switch {
		case joined && isPortFlag(flag) && r.ports[value] != "":
			word = flag + "=" + r.ports[value]
		case r.ports[word] != "" && (i == 0 || !strings.HasPrefix(argv[i-1], "-") || isPortFlag(argv[i-1])):
			word = r.ports[word]
		}
		rewritten[i] = r.Path(word)
	}
	return rewritten
}

func isPortFlag(flag string) bool {
	return flag == "-p" || strings.HasPrefix(flag, "-") && strings.HasSuffix(flag, "port")
}

// Value rewrites an environment variable.
func (r *Rewriter) Value(value string) string {
	if port := r.ports[value]; port != "" {
		return port
	}
	return r.Path(value)
}

// Path replaces every mount path in a text that stands there as a path of its
// own: not in the middle of a longer one, nor as the start of a longer name.
func (r *Rewriter) Path(text string) string {
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

func (r *Rewriter) pathAt(text string, position int) *pathPair {
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
