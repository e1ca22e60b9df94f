-- KEYS[1] meta  [2] due  [3] ended  [4] buckets  [5] key logs
-- ARGV[1] owner  [2] from  [3] to  [4] now, ms  [5] token of the preceding clear, or ''  [6] prefix of other keys
--     [7] seal, or '' to keep the current one  [8] 1 to apply even if the memory is full
-- An empty range at the checkpoint renews its time.
-- then lists, each preceded by its length:
--   buckets, for each its name and three lists: due time, id and record of scheduled jobs; time to forget, id and record of
--     ended jobs; ids of forgotten jobs
--   logs of idempotency keys, for each its name, its time to live in ms, and a list: hash and value of each key
-- Returns 'OK', 'FENCED', or 'GAP' with the offset of the checkpoint.
local meta = redis.call('HMGET', KEYS[1], 'owner', 'offset', 'cleared', 'counts')
local owner, offset, cleared = meta[1], meta[2], meta[3]
if owner ~= ARGV[1] and (owner or offset) then
  return {'FENCED'}
elseif offset then
  if meta[4] ~= counts() then
    without_mark()
    return {'GAP', false}
  elseif tonumber(offset) >= tonumber(ARGV[3]) then
    if offset == ARGV[2] and offset == ARGV[3] then
      if ARGV[8] == '1' then
        redis.call('ZREM', KEYS[2], '')
      end
      redis.call('HSET', KEYS[1], 'at', ARGV[4])
    end
    return {'OK'}
  elseif tonumber(offset) < tonumber(ARGV[2]) then
    return {'GAP', offset}
  end
elseif ARGV[5] == '' or cleared ~= ARGV[5] then
  return {'GAP', false}
end

local prefix = ARGV[6]
local at = 9

local function next_value()
  at = at + 1
  return ARGV[at - 1]
end

-- Calls a command with many values in parts: unpack is limited to 8000 values by Lua's stack.
local function call(command, key, values)
  local sum = 0
  for first = 1, #values, 4000 do
    sum = sum + redis.call(command, key, unpack(values, first, math.min(first + 3999, #values)))
  end
  return sum
end

-- Reads a list of time, id and record into the values for ZADD and HSET.
local function take(times, records)
  local time, record = #times, 0
  local last = at + tonumber(ARGV[at]) * 3
  for i = at + 1, last, 3 do
    local id = ARGV[i + 1]
    times[time + 1], times[time + 2] = ARGV[i], id
    records[record + 1], records[record + 2] = id, ARGV[i + 2]
    time, record = time + 2, record + 2
  end
  at = last + 1
end

-- Appends values of a list, starting at index `first`.
local function add(to, values, first, step)
  for i = first, #values, step do
    to[#to + 1] = values[i]
  end
end

local due, ended, forgotten, filled, buckets = {}, {}, {}, {}, {}
for i = 1, tonumber(next_value()) do
  local bucket = {name = next_value(), waiting = {}, ended = {}, forgotten = {}}
  take(due, bucket.waiting)
  take(ended, bucket.ended)
  for _ = 1, tonumber(next_value()) do
    local id = next_value()
    bucket.forgotten[#bucket.forgotten + 1] = id
    forgotten[#forgotten + 1] = id
  end
  if #bucket.waiting + #bucket.ended > 0 then
    filled[#filled + 1] = bucket.name
  end
  buckets[i] = bucket
end

-- A full Redis refuses no write of a script that has already written. So the first command decides about the whole batch:
-- HSET is refused before anything has changed, and ZREM is never refused.
if ARGV[8] == '1' then
  redis.call('ZREM', KEYS[2], '')
else
  redis.call('HSET', KEYS[1], 'at', ARGV[4])
end
local not_due = {}
add(not_due, ended, 2, 2)
add(not_due, forgotten, 1, 1)
call('ZREM', KEYS[2], not_due)
call('ZREM', KEYS[3], forgotten)
call('ZADD', KEYS[2], due)
call('ZADD', KEYS[3], ended)
call('SADD', KEYS[4], filled)
for _, bucket in ipairs(buckets) do
  local key = prefix .. 'job:' .. bucket.name
  if call('HSET', key, bucket.waiting) < #bucket.waiting / 2 then
    -- Some of these jobs existed before, and may have ended.
    local ids = {}
    add(ids, bucket.waiting, 1, 2)
    call('ZREM', KEYS[3], ids)
  end
  call('HSET', key, bucket.ended)
  if call('HDEL', key, bucket.forgotten) > 0 and redis.call('EXISTS', key) == 0 then
    redis.call('SREM', KEYS[4], bucket.name)
  end
end

for _ = 1, tonumber(next_value()) do
  local log, life = next_value(), next_value()
  local last = at + tonumber(ARGV[at]) * 2
  local new = {}
  for first = at + 1, last, 4000 do
    local names = {}
    for i = first, math.min(first + 3999, last), 2 do
      names[#names + 1] = prefix .. 'idem:' .. ARGV[i]
    end
    for i, known in ipairs(redis.call('MGET', unpack(names))) do
      local hash = first + (i - 1) * 2
      if known ~= ARGV[hash + 1] then
        redis.call('SET', names[i], ARGV[hash + 1], 'PX', life)
        new[#new + 1] = ARGV[hash]
      end
    end
  end
  at = last + 1
  if #new > 0 then
    local key = prefix .. 'idemlog:' .. log
    redis.call('APPEND', key, table.concat(new))
    redis.call('PEXPIRE', key, life)
    if redis.call('SADD', KEYS[5], log) == 1 then
      -- Logs are rarely created, so this is where logs that have expired are removed from the set.
      for _, other in ipairs(redis.call('SMEMBERS', KEYS[5])) do
        if redis.call('EXISTS', prefix .. 'idemlog:' .. other) == 0 then
          redis.call('SREM', KEYS[5], other)
        end
      end
    end
  end
end

redis.call('HSET', KEYS[1], 'offset', ARGV[3], 'at', ARGV[4], 'counts', counts())
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[1], 'seal', ARGV[7])
end
redis.call('HDEL', KEYS[1], 'cleared')
return {'OK'}
