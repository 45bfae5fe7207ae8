package toolbus

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// This file opens connections to a bus and streams on them: the only one that knows gRPC.

const (
	service = "/toolbus.v1.ToolBusService/"
	// probeTime is how long whyUnanswered waits for each answer.
	probeTime = 3 * time.Second
	window    = 4 << 20 // bytes that the bus may send before this process has read them
)

var (
	localAddress    = regexp.MustCompile(`^(unix:|127\.0\.0\.1:|localhost:|\[::1\]:)`)
	credentialValue = regexp.MustCompile(
		`(?ms)^\s*(\w+)\s*=\s*(?:"""\r?\n?(.*?)"""|'''\r?\n?(.*?)'''|"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)')`)
)

// end says how a stream ended: the name of its gRPC status, and its text.
type end struct{ code, text string }

// connection is one connection to a bus, with the credential as it is now.
type connection struct {
	channel *grpc.ClientConn
	token   string
}

// renewed returns a connection by the credential as its file has it now, and that credential; while that cannot be used, as
// where it is about to be copied, by the one before, which is nil at first. The text says why.
func renewed(address, path string, before map[string]string) (*connection, map[string]string, string, error) {
	credential, err := readCredential(path)
	if err == nil && credential["token"]+credential["certificate"] == "" && before["token"]+before["certificate"] != "" {
		err = setupErrorf("the credential %s has neither token nor certificate", path)
	}
	var made *connection
	if err == nil {
		made, err = connect(address, path, credential)
	}
	if err == nil || before == nil {
		return made, credential, "", err
	}
	why := err.Error() + "; using the credential that was read before"
	made, err = connect(address, path, before)
	return made, before, why, err
}

// connect makes a connection; a SetupError says why the credential cannot be used.
func connect(address, credentialPath string, credential map[string]string) (*connection, error) {
	target, name, config, err := dialing(address, credential)
	if err != nil {
		return nil, err
	}
	token := credential["token"]
	if token != "" && config == nil && !localAddress.MatchString(address) {
		return nil, setupErrorf("a token is not sent to %s in plain text: write tls:%s", address, address)
	}
	if strings.HasPrefix(address, "mtls:") && len(config.Certificates) == 0 {
		return nil, setupErrorf("%s", ownCertificate(address, credentialPath, credential))
	}
	network, authority, security := "tcp", cmp.Or(name, target), insecure.NewCredentials()
	if config != nil {
		security = credentials.NewTLS(config)
	}
	if path, isUnix := strings.CutPrefix(target, "unix:"); isUnix {
		network, target, authority = "unix", path, "localhost"
	}
	channel, err := grpc.NewClient("passthrough:///"+target,
		grpc.WithTransportCredentials(security),
		grpc.WithAuthority(authority),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, target)
		}),
		grpc.WithNoProxy(), grpc.WithDisableRetry(), grpc.WithDisableServiceConfig(), grpc.WithIdleTimeout(0),
		// Fixed windows: without them each message is followed by a ping that measures the connection.
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(math.MaxInt32), // the bus keeps to the max_message_bytes of the attach
			grpc.MaxCallSendMsgSize(math.MaxInt32)))
	if err != nil {
		return nil, setupErrorf("the address is %q, it must be HOST:PORT, unix:PATH, tls:HOST:PORT or mtls:HOST:PORT: %v", address, err)
	}
	return &connection{channel, token}, nil
}

// dialing returns what follows the prefix of an address, the name that its certificate shows where that is another one, and
// how the connection is secured; nil for plain text.
func dialing(address string, credential map[string]string) (string, string, *tls.Config, error) {
	prefix, target, _ := strings.Cut(address, ":")
	if prefix != "tls" && prefix != "mtls" {
		return address, "", nil, nil
	}
	name := ""
	if before, after, isNamed := strings.Cut(target, "@"); isNamed {
		name, target = before, after
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca := credential["ca"]; ca != "" {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM([]byte(ca)) {
			return "", "", nil, setupErrorf("ca of the credential holds no certificate in PEM: create the credential anew")
		}
	}
	if credential["certificate"] != "" && credential["key"] != "" {
		pair, err := tls.X509KeyPair([]byte(credential["certificate"]), []byte(credential["key"]))
		if err != nil {
			return "", "", nil, setupErrorf("certificate and key of the credential do not fit (%v): create it anew", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return target, name, config, nil
}

// ownCertificate says what is the matter with the certificate of this peer, which a bus asks for or does not accept, and how
// to fix it.
func ownCertificate(address, path string, credential map[string]string) string {
	asks := "the bus at " + address + " asks for a client certificate, and "
	switch {
	case path == "":
		return asks + "there is no credential: name its file in TOOLBUS_CREDENTIAL (toolbus keys add NAME -o FILE)"
	case credential["certificate"] == "" || credential["key"] == "":
		return asks + "the credential " + path + " has none: write one with toolbus keys add NAME -o FILE, and mtls: before the address"
	}
	return "the bus at " + address + " does not accept the certificate of the credential " + path + ", which has expired or is for another bus: " + renewal(credential)
}

func renewal(credential map[string]string) string {
	return "write it anew on the machine of the bus with toolbus keys renew " + cmp.Or(credential["name"], "NAME") + ", and copy it here"
}

// whyUnanswered finds out why nothing answers at an address although there is a listener, by a TLS handshake of its own:
// gRPC does not say that it is spoken to without TLS, or that it ended the connection because of a client's certificate. It
// returns the reason and how to fix it, empty where it knows nothing better, and whether there was a listener.
func whyUnanswered(address, path string, credential map[string]string) (string, bool) {
	target, name, config, err := dialing(address, credential)
	if err != nil || strings.HasPrefix(target, "unix:") {
		return "", true
	}
	plain, err := net.DialTimeout("tcp", target, probeTime)
	if err != nil {
		return "", false
	}
	defer plain.Close()
	_ = plain.SetDeadline(time.Now().Add(probeTime))
	isPlain := config == nil
	if isPlain {
		config = &tls.Config{InsecureSkipVerify: true} // nothing is sent to it
	}
	host, _, _ := net.SplitHostPort(target)
	config.ServerName, config.NextProtos = cmp.Or(name, host), []string{"h2"}
	secure := tls.Client(plain, config)
	err = secure.Handshake()
	server, certificate := "the server at "+address, "the certificate of the server at "+address
	var noTLS tls.RecordHeaderError
	var invalid x509.CertificateInvalidError
	var otherName x509.HostnameError
	switch {
	case isPlain && err == nil:
		return fmt.Sprintf("%s speaks TLS: write tls:%s or mtls:%s, and name a credential in TOOLBUS_CREDENTIAL", server, address, address), true
	case errors.As(err, &noTLS) && bytes.HasPrefix(noTLS.RecordHeader[:], []byte("HTTP/")):
		return server + " speaks HTTP, not gRPC: use the address that toolbus serve prints as grpc=", true
	case isPlain:
		return "", true
	case errors.As(err, &noTLS):
		return fmt.Sprintf("%s does not speak TLS: use the port of a listener with TLS, or write %s for a bus of this machine", server, target), true
	case errors.As(err, new(x509.UnknownAuthorityError)) && credential["ca"] == "":
		return certificate + " is not signed by an authority that is trusted here: check the address, or name a credential in TOOLBUS_CREDENTIAL", true
	case errors.As(err, new(x509.UnknownAuthorityError)):
		return fmt.Sprintf("%s is not signed by the ca of the credential %s: check the address, or %s", certificate, path, renewal(credential)), true
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return certificate + " has expired or is not valid yet: check the clock of this machine, or renew it there with toolbus keys init", true
	case errors.As(err, &otherName):
		names := slices.Clone(otherName.Certificate.DNSNames)
		for _, each := range otherName.Certificate.IPAddresses {
			names = append(names, each.String())
		}
		return fmt.Sprintf("%s is for %s: use one of these names in the address, or add this one there with toolbus keys init --name", certificate, strings.Join(names, ", ")), true
	case err != nil:
		return "", true
	}
	answer := make([]byte, 9) // the head of the server's SETTINGS
	_, _ = secure.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
	if _, err = io.ReadFull(secure, answer); err == nil {
		return "", true
	}
	return ownCertificate(address, path, credential), true
}

func (c *connection) outgoing(ctx context.Context) context.Context {
	if c.token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.token)
}

// invoke opens a stream, without a deadline and without waiting for its headers.
func (c *connection) invoke(ctx context.Context) (grpc.ClientStream, error) {
	description := &grpc.StreamDesc{StreamName: "Invoke", ClientStreams: true, ServerStreams: true}
	return c.channel.NewStream(c.outgoing(ctx), description, service+"Invoke", grpc.ForceCodec(encoded{}))
}

// unary makes a unary RPC; the error is a RequestError or a PeerLost.
func (c *connection) unary(ctx context.Context, method string, request, response proto.Message) error {
	err := c.channel.Invoke(c.outgoing(ctx), service+method, request, response)
	if err == nil {
		return nil
	}
	switch end := endOf(err); end.code {
	case "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED":
		return &PeerLost{end.code, end.text}
	default:
		return &RequestError{end.code, end.text}
	}
}

func (c *connection) close() { _ = c.channel.Close() }

// endOf returns the status of a stream or an RPC.
func endOf(err error) end {
	if errors.Is(err, io.EOF) {
		return end{code: "OK"}
	}
	state := status.Convert(err)
	return end{code.Code_name[int32(state.Code())], state.Message()}
}

// encoded writes messages that are encoded already, and reads those of the bus.
type encoded struct{}

func (encoded) Name() string                        { return "proto" }
func (encoded) Marshal(message any) ([]byte, error) { return message.([]byte), nil }
func (encoded) Unmarshal(data []byte, message any) error {
	return proto.Unmarshal(data, message.(proto.Message))
}

// readCredential returns the values of a credential file; none without a path.
func readCredential(path string) (map[string]string, error) {
	values := map[string]string{}
	if path == "" {
		return values, nil
	}
	content, err := readPrivate(path)
	if err != nil && !errors.As(err, new(*SetupError)) {
		err = setupErrorf("the credential %s cannot be read: %v", path, err)
	}
	if err != nil {
		return nil, err
	}
	// What `toolbus keys add` writes: basic and multi-line texts; other values are for people.
	for _, found := range credentialValue.FindAllSubmatch(content, -1) {
		value := string(found[2]) + string(found[3]) + string(found[5])
		if found[4] != nil && json.Unmarshal([]byte(`"`+string(found[4])+`"`), &value) != nil {
			return nil, setupErrorf("%s in the credential %s is no text of TOML: create the credential anew", found[1], path)
		}
		values[string(found[1])] = value
	}
	return values, nil
}

// readPrivate reads a file that no other user can read.
func readPrivate(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	owner := reflect.Indirect(reflect.ValueOf(info.Sys())).FieldByName("Uid") // of syscall.Stat_t, where there is one
	others := owner.IsValid() && owner.Uint() != 0 && owner.Uint() != uint64(os.Getuid())
	if runtime.GOOS != "windows" && (others || info.Mode().Perm()&0o077 != 0) {
		return nil, setupErrorf("%s must belong to this user, who alone may read it: chmod 600 %s", path, path)
	}
	return io.ReadAll(file)
}
