/*
 * GEMM+AllReduce's two-shot exchange (kernels/ops/gemm_ar/two_shot.h): three rail peers run launch after launch over a
 * network that delivers in any order. A launch has a chunk for each node or, every other one, for node 0 alone; the other
 * nodes then send headers. Numbers are epochs: the launch whose bytes lie in a place.
 *
 * -DONE_BANK: banks = 1, with releases.
 * -DM_...: mutants, each of which must fail (models.txt).
 */
#define N 3
#define LAST 4
#ifdef ONE_BANK
#define BANKS 1
#else
#define BANKS 2
#endif
#define AT(at, from) ((at) * N + (from))
#define IN(e, at, from) (((e) % BANKS) * N * N + AT(at, from))
/* Nodes that have a chunk in launch e. */
#define CHUNKS(e) ((e) % 2 == 0 -> N : 1)

byte sums[BANKS * N * N], finished[BANKS * N * N]; /* receive banks: [bank][at][from] */
byte sums_flag[BANKS * N * N], finished_flag[BANKS * N * N]; /* likewise, as are the next */
byte sums_sent[BANKS * N * N], finished_sent[BANKS * N * N]; /* on their way; 0: none */
byte released[N * N];                              /* [at][from]: from may write at's banks again after that launch */
byte own[N];                                       /* chunk_finished */
byte sent[N], received[N];                         /* the last launch that a role has ended */

/* One at a time to each flag: so epochs never go back. */
#define SEND(way, at, from, e) \
  atomic { assert(way[IN(e, at, from)] == 0); way[IN(e, at, from)] = e }

#define DELIVER(i) \
  :: atomic { sums_sent[i] != 0 -> sums[i] = sums_sent[i]; sums_flag[i] = sums_sent[i]; sums_sent[i] = 0 } \
  :: atomic { finished_sent[i] != 0 -> finished[i] = finished_sent[i]; finished_flag[i] = finished_sent[i]; \
       finished_sent[i] = 0 }
#define DELIVER_IN(bank) \
  DELIVER((bank) * 9 + 1) DELIVER((bank) * 9 + 2) DELIVER((bank) * 9 + 3) \
  DELIVER((bank) * 9 + 5) DELIVER((bank) * 9 + 6) DELIVER((bank) * 9 + 7)

proctype network() {
end:
  do
  DELIVER_IN(0)
#ifndef ONE_BANK
  DELIVER_IN(1)
#endif
  od
}

proctype sender(byte n) {
  byte e = 1, i;
  do
  :: e > LAST -> break
  :: else ->
     received[n] >= e - 1; /* the launch before has ended */
     for (i : 0 .. N - 1) {
       if
       :: i == n
       :: else ->
#if defined(ONE_BANK) && !defined(M_NO_RELEASES)
          released[AT(i, n)] >= e - 1;
#endif
          SEND(sums_sent, i, n, e)
       fi
     }
     if
     :: n < CHUNKS(e) ->
        own[n] >= e;
        for (i : 0 .. N - 1) {
          if
          :: i == n
          :: else -> SEND(finished_sent, i, n, e)
          fi
        }
     :: else
     fi;
     sent[n] = e;
     e++
  od
}

inline add_up() {
  for (i : 0 .. N - 1) {
    if
    :: i == n
#ifdef M_ADDS_WITHOUT_THE_LAST
    :: i != n -> assert(sums[IN(e, n, i)] == e)
#endif
    :: i != n ->
       sums_flag[IN(e, n, i)] >= e;
       assert(sums[IN(e, n, i)] == e)
    fi
  }
  own[n] = e
}
inline hand_out() {
  for (i : 0 .. N - 1) {
    if
    :: i == n || i >= CHUNKS(e)
    :: else ->
       finished_flag[IN(e, n, i)] >= e;
       assert(finished[IN(e, n, i)] == e)
    fi
  }
}

proctype receiver(byte n) {
  byte e = 1, i;
  do
  :: e > LAST -> break
  :: else ->
     sent[n] >= e - 1;
#ifdef M_HANDS_OUT_FIRST
     hand_out();
     add_up();
#else
     add_up();
     hand_out();
#endif
     for (i : 0 .. N - 1) { released[AT(n, i)] = e }
     received[n] = e;
     e++
  od
}

init {
  byte n;
  atomic {
    run network();
    for (n : 0 .. N - 1) { run sender(n); run receiver(n) }
  }
}
