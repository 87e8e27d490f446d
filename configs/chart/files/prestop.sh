#!/bin/sh
# The preStop hook of an engine's pod: waits until no proxy needs the engine any more, so that SIGTERM
# costs no request and no KV. Kubernetes has told the proxies already: the pod is being deleted.
# Needs getent and timeout, and curl or python3.
#
# It ends with 0 once each proxy says in three rounds that the engine is drained, and the engine shows
# no requests. A proxy that does not answer may have KV here that is still to be read: then the engine
# must show no requests for as long as it keeps KV that nobody reads. It ends with 1 after
# DRAIN_SECONDS: Kubernetes shows that as the event FailedPreStopHook.
#
# PDPROXY_SERVICES   URLs of headless Services of the proxies, blanks between; proxies that are ending
#                    must be among them: publishNotReadyAddresses; "": none. Certificates are not
#                    checked (default: http://pdproxy-all:8000)
# POD_IP             address by which the proxies know the engine; needed
# ENGINE_PORT        its port (default: 8000); ENGINE_SCHEME: http or https (default: http)
# DRAIN_SECONDS      seconds until it gives up, at least deadlines.engine_drain (default: 300)
# KV_SECONDS         for how long the engine may keep KV that nobody reads: its lease of 30 s, a
#                    renewal of 20 s, and a margin (default: 65)
# PAUSE, TIMEOUT     seconds between two rounds (default: 1), and for one answer (default: 5)
#
# The file `variables` beside this script may set them, too: it can change while the engine runs.
set -u

if [ -r "${0%/*}/variables" ]; then
  # shellcheck source=/dev/null
  . "${0%/*}/variables"
fi
services=${PDPROXY_SERVICES-http://pdproxy-all:8000}
case ${POD_IP:-} in
  "") echo "preStop: POD_IP is not set" && exit 1 ;;
  *:*) engine="[$POD_IP]:${ENGINE_PORT:-8000}" ;;
  *) engine="$POD_IP:${ENGINE_PORT:-8000}" ;;
esac
metrics="${ENGINE_SCHEME:-http}://$engine/metrics"
drain=${DRAIN_SECONDS:-300}
kv=${KV_SECONDS:-65}
pause=${PAUSE:-1}
timeout=${TIMEOUT:-5}
rounds=3
newline='
'

python='
import ssl, sys, urllib.error, urllib.request
tls = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
try:
    answer = opener.open(sys.argv[1], timeout=float(sys.argv[2]))
except urllib.error.HTTPError as error:
    answer = error
print(answer.read().decode(), answer.getcode(), sep="\n")
'

fetch() { # URL -> its body, and behind it a line with the status; that line alone is 000 without one
  if command -v curl >/dev/null; then
    curl -gsk -m "$timeout" --noproxy '*' -w '\n%{http_code}\n' "$1"
  else
    python3 -c "$python" "$1" "$timeout" 2>/dev/null || echo 000
  fi
}

proxies() { # their URLs, each once
  seen=' '
  for service in $services; do
    name=${service#*://} name=${name%:*}
    for address in $(timeout "$timeout" getent ahosts "$name" | while read -r one _; do echo "$one"; done); do
      case $address in *:*) address="[$address]" ;; esac
      one="${service%%://*}://$address:${service##*:}"
      case $seen in
        *" $one "*) ;;
        *) seen="$seen$one " && echo "$one" ;;
      esac
    done
  done
}

ask_proxies() { # sets `state`: "drained" if all say so, "waits" if one says no, else "silent"
  state=silent why="no proxy was found"
  silent=''
  for proxy in $(proxies); do
    if [ "$(clock)" -ge "$end" ]; then
      state=waits why=${said:-"the proxies answer slowly"}
      return
    fi
    answer=$(fetch "$proxy/drained?engine=$engine")
    case ${answer##*"$newline"} in
      200) [ "$state" = waits ] || state=drained ;;
      409) state=waits why="$proxy: ${answer%"$newline"*}" ;;
      *) silent="$proxy does not answer" ;;
    esac
  done
  if [ -n "$silent" ] && [ "$state" != waits ]; then
    state=silent why=$silent
  fi
}

is_idle() { # whether the engine shows no requests; also if it shows nothing, or does not answer
  page=$(fetch "$metrics")
  while read -r line; do
    case $line in
      vllm:num_requests_running* | vllm:num_requests_waiting*)
        case ${line##* } in 0 | 0.0) ;; *) return 1 ;; esac
        ;;
    esac
  done <<PAGE
$page
PAGE
}

clock() { date +%s; }

end=$(($(clock) + drain))
said='' good=0 idle_since=''
while :; do
  ask_proxies
  if ! is_idle; then
    good=0 idle_since='' why="the engine has requests; $state"
  else
    [ -n "$idle_since" ] || idle_since=$(clock)
    case $state in
      drained) good=$((good + 1)) ;;
      *) good=0 ;;
    esac
    if [ "$good" -ge "$rounds" ]; then
      echo "preStop: $engine is drained" && exit 0
    fi
    if [ "$state" = silent ] && [ $(($(clock) - idle_since)) -ge "$kv" ]; then
      echo "preStop: $engine has had no requests for $kv s; $why" && exit 0
    fi
  fi
  if [ "$state" != drained ] && [ "$why" != "$said" ]; then
    echo "preStop: $why"
    said=$why
  fi
  if [ "$(clock)" -ge "$end" ]; then
    echo "preStop: $engine was not drained in $drain s: $why" && exit 1
  fi
  sleep "$pause"
done
