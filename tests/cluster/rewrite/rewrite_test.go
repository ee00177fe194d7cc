package rewrite

import (
	"slices"
	"testing"
)

func example() *Rewriter {
	r := New()
	r.AddPath("/etc/specdecode/tables", "/real/tables")
	r.AddPath("/etc/specdecode", "/real/all")
	r.AddPath("/dev/termination-log", "/real/message")
	r.AddPort(8000, 20123)
	return r
}

func TestPaths(t *testing.T) {
	for situation, c := range map[string][2]string{
		"the mount itself":            {"/etc/specdecode", "/real/all"},
		"a file below it":             {"/etc/specdecode/x.json", "/real/all/x.json"},
		"a trailing slash":            {"/etc/specdecode/", "/real/all/"},
		"the longest mount wins":      {"/etc/specdecode/tables/a", "/real/tables/a"},
		"a longer name stays":         {"/etc/specdecode-other", "/etc/specdecode-other"},
		"the middle of a path stays":  {"/srv/etc/specdecode", "/srv/etc/specdecode"},
		"a value of a flag":           {"--tables=/etc/specdecode/tables", "--tables=/real/tables"},
		"entries of a search path":    {"/opt:/etc/specdecode:/usr", "/opt:/real/all:/usr"},
		"a text in JSON":              {`{"model": "/etc/specdecode/m"}`, `{"model": "/real/all/m"}`},
		"a redirection in a script":   {"echo x >/dev/termination-log; exit 1", "echo x >/real/message; exit 1"},
		"two of them":                 {"/etc/specdecode /etc/specdecode/tables", "/real/all /real/tables"},
		"an address that looks alike": {"http://host/etc/specdecode", "http://host/etc/specdecode"},
		"nothing":                     {"", ""},
	} {
		if got := example().Path(c[0]); got != c[1] {
			t.Errorf("%s: %q became %q, not %q", situation, c[0], got, c[1])
		}
	}
}

func TestPorts(t *testing.T) {
	for situation, c := range map[string][2][]string{
		"the value of a port flag":    {{"--port", "8000"}, {"--port", "20123"}},
		"joined to its flag":          {{"--port=8000"}, {"--port=20123"}},
		"the short flag":              {{"-p", "8000"}, {"-p", "20123"}},
		"a flag that ends in port":    {{"--metrics-port", "8000"}, {"--metrics-port", "20123"}},
		"positional":                  {{"http.server", "8000"}, {"http.server", "20123"}},
		"another flag's number stays": {{"--max-tokens", "8000"}, {"--max-tokens", "8000"}},
		"joined to another flag":      {{"--max-tokens=8000"}, {"--max-tokens=8000"}},
		"another number stays":        {{"--port", "8001"}, {"--port", "8001"}},
		"part of a word stays":        {{"x8000"}, {"x8000"}},
	} {
		if got := example().Arguments(c[0]); !slices.Equal(got, c[1]) {
			t.Errorf("%s: %q became %q, not %q", situation, c[0], got, c[1])
		}
	}
	if got := example().Value("8000"); got != "20123" {
		t.Errorf("a variable that is the port became %q", got)
	}
}
